"""Reducers that begin with a selection which each rank makes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.reducers.base import Array, Reducer
from sparseallreduce.streams.selection import ExactTopK, Selector
from sparseallreduce.streams.stream import SparseStream

__all__ = ["LocalSelection"]


class LocalSelection(Reducer):
    """What those reducers share: the selector, and its part in options and state.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    selector : callable
        Makes the selector from k: a class such as :class:`~sparseallreduce.streams.selection.MSTopK`, or a function that passes
        options of it on. The exact top k by default.

    Raises
    ------
    AlgorithmError
        If ``selector`` makes none.
    """

    def __init__(self, size: int, k: int, *, selector: Callable[[int], Selector] = ExactTopK) -> None:
        super().__init__(size, k)
        self._make_selector = selector
        self.selector = self._new_selector()

    def select(self, accumulator: Array, gradient: Array | None) -> SparseStream:
        """This rank's choice, as the algorithms take it; ``gradient`` is added to ``accumulator`` first."""
        return self.reduction.enter(self.selector(accumulator, gradient))

    def options(self) -> dict[str, Any]:
        return {"selector": type(self.selector).__name__}

    def reset(self) -> None:
        super().reset()
        self.selector = self._new_selector()

    def _new_selector(self) -> Selector:
        make: Any = self._make_selector
        selector = make(self.k) if callable(make) and not isinstance(make, Selector) else None
        if not isinstance(selector, Selector):
            raise AlgorithmError(f"selector makes a Selector from k, as the class MSTopK does: {make!r} does not")
        return selector
