"""REQUIRE_TORCH turns "PyTorch is not installed" from skipped tests into an error."""

import os
from importlib.util import find_spec

import pytest

if os.environ.get("REQUIRE_TORCH") and find_spec("torch") is None:
    raise pytest.UsageError("PyTorch is not installed here: `make test-torch` installs it")
