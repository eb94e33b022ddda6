"""The base class of reducers that begin with a separate selection on each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparseallreduce.errors import AlgorithmError, CheckpointError
from sparseallreduce.reducers.base import Array, Reducer
from sparseallreduce.streams.selection import ExactTopK, Selector
from sparseallreduce.streams.stream import SparseStream

__all__ = ["LocalSelection"]


class LocalSelection(Reducer):
    """Base class of reducers with a selector, which is part of their options and state.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    hosts : bool
        As for :class:`~sparseallreduce.Reducer`.
    selector : callable
        Returns the selector, given k: a class such as :class:`~sparseallreduce.streams.selection.MSTopK`, or a function that passes options
        to it. The exact top k by default.

    Raises
    ------
    AlgorithmError
        If ``selector`` does not return a selector.
    """

    def __init__(self, size: int, k: int, *, selector: Callable[[int], Selector] = ExactTopK, hosts: bool = False) -> None:
        super().__init__(size, k, hosts=hosts)
        self._make_selector = selector
        self.selector: Selector = self._new_selector()

    def select(self, accumulator: Array, gradient: Array | None) -> SparseStream:
        """Add ``gradient`` to ``accumulator``, and return this rank's selection in the internal form of streams.

        A selector that must select k values selects zeros if there is nothing else; these are not sent.
        """
        return self.reduction.enter(self.selector.nonzero(accumulator, gradient))

    def options(self) -> dict[str, Any]:
        return {"selector": type(self.selector).__name__}

    def reset(self) -> None:
        super().reset()
        self.selector = self._new_selector()

    def state(self) -> dict[str, Any]:
        return super().state() | {"selector": type(self.selector).__name__} | _attributes(self.selector, "selector.")

    def restore(self, state: Mapping[str, Any]) -> None:
        ours = self.state()["selector"]
        if state.get("selector") != ours:
            raise CheckpointError(f"this state is of a reducer with selector {state.get('selector')}, and this one has {ours}")
        super().restore(state)
        self.selector = self._new_selector()
        _set_attributes(self.selector, "selector.", state)

    def _kept(self) -> dict[str, Any]:
        return super()._kept() | {"selector": self.selector, "of the selector": _attributes(self.selector, "")}

    def _take_back(self, kept: dict[str, Any]) -> None:
        of_selector = kept.pop("of the selector")
        super()._take_back(kept)
        _set_attributes(self.selector, "", of_selector)

    def _new_selector(self) -> Selector:
        make: Any = self._make_selector
        selector = make(self.k) if callable(make) and not isinstance(make, Selector) else None
        if not isinstance(selector, Selector):
            raise AlgorithmError(f"selector must return a Selector for a k, as the class MSTopK does, not {make!r}")
        return selector


def _attributes(of: Any, prefix: str) -> dict[str, Any]:
    """Return the options and the state of a selector and of its parts: numbers, strings and arrays, without None."""
    found: dict[str, Any] = {}
    for name, value in vars(of).items():
        if hasattr(value, "__dict__"):
            found |= _attributes(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = value.copy() if isinstance(value, np.ndarray) else value
    return found


def _set_attributes(of: Any, prefix: str, values: Mapping[str, Any]) -> None:
    for name, value in vars(of).items():
        if hasattr(value, "__dict__"):
            _set_attributes(value, f"{prefix}{name}.", values)
        else:
            setattr(of, name, values.get(prefix + name))
