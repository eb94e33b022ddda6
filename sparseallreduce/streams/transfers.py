"""Copy arrays between the host and a GPU in pieces, on separate CUDA streams, concurrently with kernels and messages.

A copy waits on its stream for earlier work on the current stream, and the current stream waits for copies to the device before it
continues; the host waits for neither. The host waits only for copies to the host, and for each piece when it is read. The memory of a copy
is kept until the copy is complete, whatever happens to the caller, so that it is not reused too early.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams import memory
from sparseallreduce.streams.pinned import PinnedPool, bound_of

__all__ = ["Download", "Transfers", "Upload", "transfers_of"]

PIECE = 1 << 20  # bytes that are copied at once
_MOST = 64  # pieces of an array
_AHEAD = 16  # pieces that are on their way to the device before the host waits for the first of them

Array = NDArray[Any]


class Transfers:
    """The copies from and to one device.

    Parameters
    ----------
    xp : module
        CuPy, or a compatible module.
    pool : PinnedPool
    """

    xp: Any
    pool: PinnedPool
    down: _Lane
    up: _Lane

    def __init__(self, xp: Any, pool: PinnedPool) -> None:
        self.xp, self.pool = xp, pool
        self.down, self.up = (_Lane(xp) for _ in range(2))  # a GPU has one copy engine for each direction

    def download(self, sources: Sequence[Any], targets: Sequence[Array] | None = None) -> tuple[Sequence[Array], Download]:
        """Start to copy arrays of one length to the host, to memory of the pool or to given arrays.

        Returns
        -------
        sequence of ndarray
            The targets, readable as far as the download has progressed.
        Download
        """
        contiguous = [self.xp.ascontiguousarray(source) for source in sources]
        self.tidy()
        if targets is None:
            targets = [self.room(source.shape, source.dtype) for source in contiguous]
        count = len(contiguous[0]) if contiguous else 0
        nbytes = sum(source.nbytes for source in contiguous)
        step = max(-(-count // _MOST), count * PIECE // max(nbytes, 1), 1)
        pieces: list[tuple[int, Any]] = []
        self.down.follow()
        try:
            for first in range(0, count, step):
                for source, target in zip(contiguous, targets, strict=True):
                    part = source[first : first + step]
                    part.get(stream=self.down.stream, out=target[first : first + step], blocking=False)
                pieces.append((min(first + step, count), self.down.event()))
        finally:
            if count:
                self.down.keep(self.down.event(), contiguous, targets)
        return targets, Download(self, pieces)

    def room(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a host array, on page-locked memory if some is available."""
        pinned = self.pool.take(shape, dtype)
        return memory.empty(shape, dtype) if pinned is None else pinned

    def to_device(self, sources: Sequence[Array]) -> list[Any]:
        """Return copies of arrays of one length on the device, ready for use on the current stream."""
        upload = Upload(self, [(source.shape, source.dtype) for source in sources])
        upload.take(sources, len(sources[0]) if sources else 0)
        return upload.finish()

    def release(self) -> None:
        """Make the current stream wait for the copies to the host, so that it may overwrite their sources."""
        self.xp.cuda.get_current_stream().wait_event(self.down.event())

    def tidy(self) -> None:
        """Release the memory of completed copies."""
        self.down.tidy()
        self.up.tidy()


class _Lane:
    """The CUDA stream for copies in one direction, and the memory that they use."""

    stream: Any

    def __init__(self, xp: Any) -> None:
        self._xp, self.stream = xp, xp.cuda.Stream(non_blocking=True)
        self.under_way: deque[tuple[Any, Any]] = deque()

    def event(self, stream: Any = None) -> Any:
        """Return an event recorded on a stream, by default the copy stream."""
        event = self._xp.cuda.Event(disable_timing=True)
        event.record(stream or self.stream)
        return event

    def follow(self) -> None:
        """Make future copies wait for the work on the current stream."""
        self.stream.wait_event(self.event(self._xp.cuda.get_current_stream()))

    def keep(self, event: Any, *kept: Any) -> None:
        """Keep the memory of a copy until it is complete."""
        self.under_way.append((event, kept))

    def tidy(self, most: int | None = None) -> None:
        """Release the memory of completed copies; with ``most``, wait until at most that many are pending."""
        while self.under_way:
            event, _ = self.under_way[0]
            if not event.done:
                if most is None or len(self.under_way) <= most:
                    return
                event.synchronize()
            try:
                self.under_way.popleft()
            except IndexError:  # by another thread
                return


class Download:
    """A copy to the host in progress."""

    def __init__(self, transfers: Transfers, pieces: list[tuple[int, Any]]) -> None:
        self._transfers, self._pieces = transfers, deque(pieces)  # end of each piece, in entries, and its event
        self._here = 0  # entries that have arrived

    def wait(self, entries: int | None = None) -> None:
        """Wait for the first ``entries`` entries, or for all."""
        event = None
        while self._pieces and (entries is None or self._here < entries):
            self._here, event = self._pieces.popleft()
        if event is not None:
            event.synchronize()
            if not self._pieces:
                self._transfers.down.tidy()


class Upload:
    """Device arrays that are filled piece by piece.

    Parameters
    ----------
    transfers : Transfers
    arrays : sequence of (shape, dtype)
        The shape and dtype of each array; all have the same length.
    """

    def __init__(self, transfers: Transfers, arrays: Sequence[tuple[Any, Any]]) -> None:
        self._transfers = transfers
        self.arrays: list[Any] = [transfers.xp.empty(shape, dtype) for shape, dtype in arrays]
        self.done: int = 0  # entries that have been read
        transfers.up.follow()  # kernels may still read earlier arrays in the same memory

    def take(self, sources: Sequence[Array], end: int) -> None:
        """Copy the entries up to ``end`` that have not been copied.

        If no page-locked memory is available, the sources are read later and must not change.
        """
        lane, pool = self._transfers.up, self._transfers.pool
        for source, target in zip(sources, self.arrays, strict=True):
            step = max(PIECE * len(source) // max(source.nbytes, 1), 1)
            for first in range(self.done, end, step):
                last = min(first + step, end)
                lane.tidy(_AHEAD)
                piece = np.ascontiguousarray(source[first:last])
                pinned = pool.take(piece.shape, piece.dtype)
                if pinned is not None:
                    np.copyto(pinned, piece)
                    piece = pinned
                try:
                    target[first:last].set(piece, stream=lane.stream)
                finally:
                    lane.keep(lane.event(), piece, target)
        self.done = end

    def finish(self) -> list[Any]:
        """Return the arrays; work that is queued on the current stream from now on sees them filled."""
        self._transfers.xp.cuda.get_current_stream().wait_event(self._transfers.up.event())
        return self.arrays


_known: dict[tuple[str, int], Transfers] = {}
_pools: dict[str, PinnedPool] = {}


def transfers_of(xp: Any) -> Transfers:
    """Return the transfers of the current device."""
    key = xp.__name__, int(xp.cuda.Device().id)
    found = _known.get(key)
    if found is None:
        pool = _pools.get(xp.__name__)
        if pool is None:
            cuda = xp.cuda
            pool = PinnedPool(lambda nbytes: cuda.PinnedMemoryPointer(cuda.PinnedMemory(nbytes), 0), bound_of())
            pool = _pools.setdefault(xp.__name__, pool)
        found = _known.setdefault(key, Transfers(xp, pool))
    return found


@atexit.register
def _close() -> None:
    """Release everything while the driver is still loaded."""
    for transfers in _known.values():
        for lane in (transfers.down, transfers.up):
            lane.under_way.clear()
    _known.clear()
    _pools.clear()
