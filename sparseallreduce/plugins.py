"""Extensions that installed packages declare by entry points: algorithms, reducers, codecs and strategies."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

__all__ = ["OFF", "load"]

OFF = "SPARSEALLREDUCE_PLUGINS"  # the environment variable that keeps extensions from being loaded, if it is 0


def load(group: str, register: Callable[[str, Any], None]) -> None:
    """Load the entry points of the group ``sparseallreduce.<group>``, and register each.

    An entry point that cannot be loaded or registered is left out with a RuntimeWarning, so that a broken package does not keep the
    library from being imported.

    Parameters
    ----------
    group : str
        "algorithms", "reducers", "codecs" or "strategies".
    register : callable
        Called with the name of each entry point and the object that it names.
    """
    if os.environ.get(OFF) == "0":
        return
    for entry in sorted(_installed().select(group=f"sparseallreduce.{group}")):
        try:
            register(entry.name, entry.load())
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            warnings.warn(f"the extension {entry.name} = {entry.value} of {group} is left out: {what}", RuntimeWarning, stacklevel=2)


@cache
def _installed() -> Any:
    """Return the entry points of all installed packages; reading them takes longest, and is done once."""
    return entry_points()
