"""Commands invoked in the process of a test, with what they print and what they complain of apart under every version of click."""

import inspect

from click import testing

# Until click 8.1 they came together unless asked for apart; since 8.2 they always come apart, and cannot be asked for.
_APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(testing.CliRunner).parameters else {}


class CliRunner(testing.CliRunner):
    """That of click, whose results have ``stdout`` and ``stderr``."""

    def __init__(self) -> None:
        super().__init__(**_APART)
