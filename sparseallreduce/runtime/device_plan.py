"""Copy values of plans with fixed indices from a GPU to the host, and results back.

The plan itself runs on the host: messages are sent from host memory and the sums are computed there, so that values cross the link to the
GPU once in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import on_device
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.transfers import Download, transfers_of

__all__ = ["DeviceEnds", "checked_place", "lies_on_device", "moved"]

Array = NDArray[Any]


def lies_on_device(given: Any) -> bool:
    """Return True if a stream or an array of values is on a GPU."""
    return given.__class__ is not np.ndarray and (given.on_device if isinstance(given, SparseStream) else on_device(given))


def checked_place(given: Any, there: bool) -> None:
    """Raise an error unless a stream or an array is where the plan's streams are: on a GPU if ``there``."""
    if lies_on_device(given) != there:
        place, other, move = ("on a GPU", "the host", "to_device") if there else ("on the host", "a GPU", "to_host")
        raise StreamTypeError(f"this plan is for streams {place}, but was given one on {other}: move it, for example with stream.{move}()")


def moved(stream: SparseStream, xp: Any) -> SparseStream:
    """Return a copy of a host stream on the device, ready for use on the current CUDA stream."""
    arrays = iter(transfers_of(xp).to_device([array for array in stream._arrays if array is not None]))
    return Reduction.freeze(stream._moved(lambda _: next(arrays)))


class DeviceEnds:
    """The GPU side of a plan: it copies the values of streams of one dtype and width to the host, and the results back.

    Parameters
    ----------
    xp : module
        CuPy.
    sets : sequence of device arrays
        The indices of each stream.
    """

    xp: Any

    def __init__(self, xp: Any, sets: Sequence[Any]) -> None:
        self.xp, self._transfers = xp, transfers_of(xp)
        self._sets = [indices.copy() for indices in sets]
        self._under_way: list[Download] = []
        self._finish()

    def room(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return host memory for all values, page-locked if possible."""
        return self._transfers.room(shape, dtype)

    def take(self, number: int, given: Any, part: Array) -> None:
        """Start to copy the values of stream ``number``, given as a stream or an array, to ``part`` of the host memory.

        Raises
        ------
        StreamError, StreamTypeError
            If indices, shape or dtype do not match the plan.
        """
        values = self._values_of(number, given) if isinstance(given, SparseStream) else self.xp.asarray(given)
        if values.dtype != part.dtype and not np.can_cast(values.dtype, part.dtype, "same_kind"):
            raise StreamTypeError(f"this plan is for values of {part.dtype}, not {values.dtype}: convert them")
        if values.shape != part.shape:
            raise StreamError(f"this plan takes values of shape {part.shape}, one for each of its positions, not {values.shape}")
        _, download = self._transfers.download([values.astype(part.dtype, copy=False)], [part])
        self._under_way.append(download)
        self._transfers.release()  # the user may change the values again

    def settle(self) -> None:
        """Wait until all copies to the host are complete."""
        while self._under_way:
            self._under_way.pop().wait()

    def _values_of(self, number: int, stream: SparseStream) -> Any:
        """Return the values of a stream, whose positions must be those of the plan."""
        xp, indices = self.xp, self._sets[number]
        if stream._indices is None:
            values = stream._stored[indices.astype(np.intp)]
            present = values != 0 if values.ndim == 1 else values.any(axis=1)
            if stream._present is None and int(xp.count_nonzero(present)) == stream.nnz:
                return values
        theirs, values = stream._entries()
        if len(theirs) != len(indices) or not bool((theirs == indices).all()):
            raise StreamError(f"the {len(theirs)} indices of the stream differ from the {len(indices)} of the plan: create another plan")
        return values

    def lay_out(self, results: Sequence[SparseStream], dense: Sequence[Array]) -> None:
        """Record the form of the host results, and the positions from which the values of dense ones are taken."""
        self._results, places = results, iter(dense)
        self._places = [self.xp.asarray(next(places) if result.is_dense else result._indices) for result in results]
        self._present = [None if result._present is None else self.xp.asarray(result._present) for result in results]
        self._finish()

    def results(self, sums: Array) -> list[SparseStream]:
        """Return the results in new device memory, given the sums at all positions of the union."""
        (values,) = self._transfers.to_device([sums])
        cuts = [0, *np.cumsum([len(each) for each in self._places]).tolist()]
        made = []
        for like, indices, present, (low, high) in zip(self._results, self._places, self._present, pairwise(cuts), strict=True):
            if not like.is_dense:
                made.append(SparseStream._sparse_form(indices, values[low:high], like.size, density=like.switch_density))
                continue
            array = self.xp.zeros(like._stored.shape, like.dtype)
            kernels.scatter_set(indices, values[low:high], 0, array)
            made.append(SparseStream._dense_form(array, like.size, present=present, density=like.switch_density))
        return made

    def _finish(self) -> None:
        """Wait for the arrays that the plan keeps, because later sums may use them on another CUDA stream."""
        self.xp.cuda.get_current_stream().synchronize()
