"""A stream that is being copied from a GPU to the host, and can be read from the front meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.transfers import Download, Transfers

__all__ = ["StagedStream"]

Array = NDArray[Any]


class StagedStream(SparseStream):
    """A copy on the host of a stream on a device. Access to its arrays waits for the whole copy, except through :meth:`upto`."""

    __slots__ = ("_download", "_plain")

    _download: Download
    _plain: SparseStream  # on the same arrays

    @classmethod
    def of(cls, stream: SparseStream, transfers: Transfers) -> StagedStream:
        """Start to copy a stream from the device."""
        present = [array for array in stream._arrays if array is not None]
        arrays, download = transfers.download(present)
        coming = iter(arrays)
        plain = stream._moved(lambda _: next(coming))
        plain._owned = True
        staged = cls.__new__(cls)
        staged._indices, staged._values, staged._array, staged._present = plain._arrays
        staged._owned = False
        staged.size, staged.lo, staged.hi, staged.switch_density = stream.size, stream.lo, stream.hi, stream.switch_density
        staged._download, staged._plain = download, plain
        return staged

    def upto(self, entries: int) -> SparseStream:
        """Return the stream once its first ``entries`` entries have been copied."""
        self._download.wait(entries)
        return self._plain

    def settled(self) -> SparseStream:
        """Return the stream once it has been copied; its arrays are not shared."""
        self._download.wait()
        return self._plain

    @property
    def _raw(self) -> Array:
        array = self._values if self._array is None else self._array
        assert array is not None
        return array

    @property
    def _stored(self) -> Array:
        return self.settled()._stored

    @property
    def _arrays(self) -> tuple[Array | None, ...]:
        return self.settled()._arrays

    def _entries(self) -> tuple[Array, Array]:
        return self.settled()._entries()

    def _mask(self) -> NDArray[np.bool_]:
        return self.settled()._mask()

    @property
    def nnz(self) -> int:
        """The number of entries; waits for the copy."""
        return self.settled().nnz

    @property
    def on_device(self) -> bool:
        """False, because the arrays are on the host."""
        return False

    @property
    def stored(self) -> int:
        """The number of entries in memory, copied or not."""
        return len(self._raw)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self._raw.dtype

    @property
    def width(self) -> int | None:
        """The values in a row of a row-sparse stream, None for a plain vector."""
        return None if self._raw.ndim == 1 else int(self._raw.shape[1])
