"""Measure the constants of the cost model for streams on a GPU: kernels, and copies to and from the host."""

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
    """Measure the constants of this rank's GPU, each as the fastest of several repetitions; tens of milliseconds in total.

    It copies one byte and many, in pageable memory, reduces streams of 16 entries and of many, and fills a dense array, waiting for
    kernels.

    Parameters
    ----------
    xp : module
        CuPy, or a compatible module.
    sharing : float
        Ranks per GPU, by which times are multiplied, since other ranks were idle during the measurement.
    entries, size, nbytes : int
        Sizes of each of two streams, of the dense array, and of a copy.

    Returns
    -------
    dict
        Values in seconds for fields of :class:`~sparseallreduce.Machine`.
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
    """Return a stream with every eighth index from an offset on, so that the sum of two stays sparse."""
    indices = np.arange(entries, dtype=np.uint32) * np.uint32(8) + np.uint32(offset)
    return SparseStream._sparse_form(indices, np.ones(entries, np.float32), 8 * entries)
