"""What a check returns, and what it raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["CheckFailure", "Report"]


class CheckFailure(AssertionError):
    """Raised by a check for a promise that does not hold, with an example."""


class Report:
    """The promises that a check has tried, each with the number of examples.

    Parameters
    ----------
    subject : str
        What is checked.

    Attributes
    ----------
    counts : Counter
        Examples tried, by the promise that they are of.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.counts: Counter[str] = Counter()

    def __str__(self) -> str:
        lines = [f"{self.subject}: all promises hold"]
        return "\n".join([*lines, *(f"  {promise:<64} {count:7,} examples" for promise, count in self.counts.items())])

    def __repr__(self) -> str:
        return f"Report({self.subject!r}, {sum(self.counts.values())} examples)"

    @contextmanager
    def promise(self, text: str, example: Callable[[], str]) -> Iterator[None]:
        """Count an example of a promise; whatever the block raises becomes a CheckFailure that describes the example."""
        try:
            yield
        except CheckFailure as failure:
            raise CheckFailure(f"{self.subject}: {text}: {failure}\n  example: {example()}") from failure.__cause__
        except Exception as error:
            raise CheckFailure(f"{self.subject}: {text}: {type(error).__name__}: {error}\n  example: {example()}") from error
        self.counts[text] += 1


def expect(condition: Any, text: str) -> None:
    """Raise CheckFailure with a text unless a condition holds."""
    if not condition:
        raise CheckFailure(text)
