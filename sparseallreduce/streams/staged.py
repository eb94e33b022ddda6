"""A stream of a GPU on its way to the host, which can be read from the front while the rest of it comes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.transfers import Download, Transfers

__all__ = ["StagedStream"]

Array = NDArray[Any]


class StagedStream(SparseStream):
    """A copy on the host of a stream of a device: all that reads its arrays waits until they are there, but :meth:`upto`."""

    __slots__ = ("_download", "_plain")

    _download: Download
    _plain: SparseStream  # on the same arrays

    @classmethod
    def of(cls, stream: SparseStream, transfers: Transfers) -> StagedStream:
        """Begin to copy a stream that lies on the device."""
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
        """The stream, of which the first so many entries may be read; waits for them."""
        self._download.wait(entries)
        return self._plain

    def settled(self) -> SparseStream:
        """The stream, once all of it is there; its arrays are nobody else's."""
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
        """As of any stream."""
        return self.settled().nnz

    @property
    def on_device(self) -> bool:
        """Never."""
        return False

    @property
    def stored(self) -> int:
        """Entries in memory, there or not."""
        return len(self._raw)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return self._raw.dtype

    @property
    def width(self) -> int | None:
        """Values in a row of a row-sparse stream, None for a plain vector."""
        return None if self._raw.ndim == 1 else int(self._raw.shape[1])
