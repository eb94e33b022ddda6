"""The constants of the cost model for streams on a GPU: what its kernels take, and copies to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from sparseallreduce.algorithms.steps import Clock, Step
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["measure_device"]

_REPETITIONS = 5  # of which the first compiles


def measure_device(
    xp: Any, sharing: float = 1.0, *, entries: int = 1 << 20, size: int = 1 << 24, nbytes: int = 1 << 24
) -> Generator[Step, Any, dict[str, float]]:
    """What this rank finds of its GPU: each is the fastest of some repetitions, tens of milliseconds in all.

    Copies are of one byte and of many, in memory as arrays have it; reductions of streams of 16 entries and of many; and a dense array is
    filled. Kernels are waited for.

    Parameters
    ----------
    xp : module
        CuPy, or what stands for it.
    sharing : float
        Ranks to a GPU: what was fast while the others waited takes so much longer when all use it.
    entries, size, nbytes : int
        Of each of two streams, of the dense array, and of a copy.

    Returns
    -------
    dict
        By the names of the fields of :class:`~sparseallreduce.Machine`, in seconds.
    """
    reduction, device = Reduction(), xp.cuda.Device()

    def fastest(call: Callable[[], object]) -> Generator[Step, Any, float]:
        times: list[float] = []
        for _ in range(_REPETITIONS):
            device.synchronize()
            start = yield Clock()
            call()
            device.synchronize()
            times.append((yield Clock()) - start)
        return min(times)

    byte, block = np.zeros(1, np.uint8), np.zeros(nbytes, np.uint8)
    ours, theirs = xp.asarray(byte), xp.asarray(block)
    few, many = ([_strided(count, offset).to_device(xp) for offset in (0, 1)] for count in (16, entries))
    none = SparseStream([], np.zeros(0, np.float32), size).to_device(xp)
    to_host, block_to_host = (yield from fastest(ours.get)), (yield from fastest(theirs.get))
    to_device = yield from fastest(lambda: xp.asarray(byte))
    block_to_device = yield from fastest(lambda: xp.asarray(block))
    begun = yield from fastest(lambda: reduction.pair(*few))
    merged = yield from fastest(lambda: reduction.pair(*many))
    filled = yield from fastest(lambda: reduction.densify(none))
    return {
        "gamma_device": sharing * max(merged - begun, 0.0) / (2 * entries),
        "gamma_dense_device": sharing * max(filled - begun, 0.0) / size,
        "alpha_device": sharing * begun,
        "alpha_to_host": sharing * to_host,
        "beta_to_host": sharing * max(block_to_host - to_host, 0.0) / nbytes,
        "alpha_to_device": sharing * to_device,
        "beta_to_device": sharing * max(block_to_device - to_device, 0.0) / nbytes,
    }


def _strided(entries: int, offset: int) -> SparseStream:
    """Every eighth index from an offset on, so that two do not become dense."""
    indices = np.arange(entries, dtype=np.uint32) * np.uint32(8) + np.uint32(offset)
    return SparseStream._sparse_form(indices, np.ones(entries, np.float32), 8 * entries)
