"""What steps change of the weights, written down before they do, so that a call that fails leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

__all__ = ["Journal", "Journalled"]

Array = NDArray[Any]


class Journal:
    """The earlier values of weights, and of all that is kept for each of them, at the places that steps change.

    It costs as much as the gradients have entries. Before what changes all weights, and where the entries come to be more than the
    weights are, all of these are copied.

    Parameters
    ----------
    arrays : dict of str to ndarray
        By name, those with an entry for every weight; which are changed in place.
    put_numbers_back : callable
        Makes all else what it is now.

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
        """These entries are about to change."""
        if self._whole is not None:
            return
        self._noted += len(places)
        if self._noted > self._size:
            self.note_all()
        else:
            places = places.copy()  # of a gradient, whose room is used again
            self._entries.append((places, {name: array[places] for name, array in self._arrays.items()}))

    def note_all(self) -> None:
        """All entries are about to change."""
        if self._whole is None:
            whole = {name: array.copy() for name, array in self._arrays.items()}
            self._write(whole)
            self._whole = whole
            self._entries = []

    def put_back(self) -> None:
        """Make all what it was when the journal was begun; may be called again if that is interrupted."""
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
    """Weights whose changes can be taken back. A subclass writes down in :meth:`note` what it is about to change."""

    #: Attributes, beside the arrays with an entry for every weight, that steps change; none is changed in place.
    _NUMBERS: tuple[str, ...] = ()
    _journal: Journal | None = None

    def _shared_names(self) -> list[str]:
        """Of the arrays with an entry for every weight."""
        raise NotImplementedError

    def begin_journal(self) -> None:
        """From now on, changes can be taken back by :meth:`put_back`, until :meth:`end_journal`; of weights that no ranks share."""
        arrays, numbers = {name: getattr(self, name) for name in self._shared_names()}, self._numbers()
        self._journal = Journal(arrays, lambda: self._put_numbers_back(numbers))

    def end_journal(self) -> None:
        """Keep all changes."""
        self._journal = None

    def put_back(self) -> None:
        """Become what the weights were when the journal was begun, if one has been and not ended."""
        if self._journal is not None:
            self._journal.put_back()
            self._journal = None

    def note(self, places: Array | None) -> None:
        """Single weights at these places are about to change, or all."""
        if self._journal is not None:
            if places is None:
                self._journal.note_all()
            else:
                self._journal.note(places)

    @property
    def noting(self) -> bool:
        """Whether there is a journal."""
        return self._journal is not None

    def _numbers(self) -> dict[str, Any]:
        """What changes beside the arrays with an entry for every weight."""
        return {name: getattr(self, name) for name in self._NUMBERS}

    def _put_numbers_back(self, numbers: dict[str, Any]) -> None:
        for name in self._NUMBERS:
            setattr(self, name, numbers[name])
