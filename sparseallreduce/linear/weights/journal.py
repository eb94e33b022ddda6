"""A journal of the values that steps overwrite, so that a call that fails can restore them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

__all__ = ["Journal", "Journalled"]

Array = NDArray[Any]


class Journal:
    """The earlier values of arrays at the positions that steps change.

    Its cost is proportional to the entries of the gradients. All values are copied before a change of all weights, and once the
    entries outnumber the weights.

    Parameters
    ----------
    arrays : dict of str to ndarray
        Arrays with one entry per weight, by name. They are changed in place.
    put_numbers_back : callable
        Function that restores all other state.

    Examples
    --------
    >>> import numpy as np
    >>> weights = np.zeros(4)
    >>> journal = Journal({"weights": weights}, lambda: None)
    >>> for place in (1, 3, 1):
    ...     journal.note(np.array([place]))
    ...     weights[place] += 1
    >>> journal.put_back()
    >>> weights
    array([0., 0., 0., 0.])
    """

    def __init__(self, arrays: dict[str, Array], put_numbers_back: Callable[[], object]) -> None:
        self._arrays = arrays
        self._put_numbers_back = put_numbers_back
        self._size = max((len(array) for array in arrays.values()), default=0)
        self._noted = 0
        self._entries: list[tuple[Array, dict[str, Array]]] = []
        self._whole: dict[str, Array] | None = None

    def note(self, places: Array) -> None:
        """Save the values of these entries, which are about to change."""
        if self._whole is not None:
            return
        self._noted += len(places)
        if self._noted > self._size:
            self.note_all()
        else:
            places = places.copy()  # the buffer of a gradient is reused
            self._entries.append((places, {name: array[places] for name, array in self._arrays.items()}))

    def note_all(self) -> None:
        """Save all values, because all are about to change."""
        if self._whole is None:
            whole = {name: array.copy() for name, array in self._arrays.items()}
            self._write(whole)
            self._whole = whole
            self._entries = []

    def put_back(self) -> None:
        """Restore all values from the start of the journal. May be called again after an interrupt."""
        if self._whole is None:
            self._write(self._arrays)
        else:
            for name, array in self._arrays.items():
                array[:] = self._whole[name]
        self._put_numbers_back()

    def _write(self, arrays: dict[str, Array]) -> None:
        for places, values in reversed(self._entries):
            for name, array in arrays.items():
                array[places] = values[name]


class Journalled:
    """Base class of weights whose changes can be undone. A subclass calls :meth:`note` before each change."""

    #: Attributes other than arrays with one entry per weight that steps change; none is changed in place.
    _NUMBERS: tuple[str, ...] = ()
    _journal: Journal | None = None

    def _shared_names(self) -> list[str]:
        """Return the names of the arrays with one entry per weight."""
        raise NotImplementedError

    def begin_journal(self) -> None:
        """Start to record changes, so that :meth:`put_back` can undo them until :meth:`end_journal`. Not for weights shared by ranks."""
        arrays, numbers = {name: getattr(self, name) for name in self._shared_names()}, self._numbers()
        self._journal = Journal(arrays, lambda: self._put_numbers_back(numbers))

    def end_journal(self) -> None:
        """Keep all changes."""
        self._journal = None

    def put_back(self) -> None:
        """Restore the weights from the start of the journal, if there is one."""
        if self._journal is not None:
            self._journal.put_back()
            self._journal = None

    def note(self, places: Array | None) -> None:
        """Record that single weights at these positions, or all, are about to change."""
        if self._journal is not None:
            if places is None:
                self._journal.note_all()
            else:
                self._journal.note(places)

    @property
    def noting(self) -> bool:
        """True if there is a journal."""
        return self._journal is not None

    def _numbers(self) -> dict[str, Any]:
        """Return the state that changes in addition to the arrays with one entry per weight."""
        return {name: getattr(self, name) for name in self._NUMBERS}

    def _put_numbers_back(self, numbers: dict[str, Any]) -> None:
        for name in self._NUMBERS:
            setattr(self, name, numbers[name])
