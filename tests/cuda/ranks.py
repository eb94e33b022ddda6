"""Program for ranks that share a GPU, or the simulator: sums and reducers on streams of the device against the same on the host.

Run as ``mpiexec -n 2 python tests/cuda/ranks.py``; ``tests/cuda/test_ranks.py`` does.
"""

import os
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import sparseallreduce as sar

ON_DEVICE = os.environ.get("SPARSEALLREDUCE_TEST_GPU") == "1"
SIZE, ENTRIES, K = (300_000, 6000, 4000) if ON_DEVICE else (300, 9, 5)  # the simulator runs a thread of Python for each of the device


def array_module():
    """CuPy on a GPU, and under numba's simulator what stands for it."""
    if ON_DEVICE:
        import cupy

        return cupy
    import device_arrays
    from numba.cuda.simulator import kernel

    from sparseallreduce.streams.kernels.cuda import ranking

    ranking.DIGIT, ranking.DIGITS = 5, 2**5

    def is_alive(self):
        time.sleep(0)
        return threading.Thread.is_alive(self)

    kernel.BlockThread.is_alive = is_alive
    return device_arrays


def same(ours, theirs):
    """To the bit: values are small integers, whose sums are exact in any order."""
    assert ours.on_device and not theirs.on_device
    np.testing.assert_array_equal(ours.to_host().to_dense(), theirs.to_dense())


def check_sums(comm, xp):
    rng = np.random.default_rng(comm.rank)

    def drawn(dtype, entries=ENTRIES):
        indices = np.sort(rng.choice(SIZE, entries, replace=False))
        return sar.SparseStream(indices, rng.integers(1, 9, entries).astype(dtype), SIZE)

    for dtype in ("float32", "int64"):
        stream = drawn(dtype)
        for algorithm in sar.algorithms() if ON_DEVICE else ("auto", "dsar_split_allgather", "dense"):
            same(sar.allreduce(stream.to_device(xp), comm, algorithm=algorithm), sar.allreduce(stream, comm, algorithm=algorithm))
    streams = [drawn("float32"), drawn("float32", SIZE // 2), drawn("float64")]
    ours = sar.iallreduce([stream.to_device(xp) for stream in streams], comm)
    theirs = sar.allreduce(streams, comm)
    for our, their in zip(ours.wait(), theirs, strict=True):
        same(our, their)


def check_reducers(comm, xp):
    rng = np.random.default_rng((1, comm.rank))
    for make in (sar.GTopk, sar.OkTopk, sar.TopkA, sar.TopkDSA) if ON_DEVICE else (sar.GTopk, sar.OkTopk):
        ours, theirs = sar.ErrorFeedback(make(SIZE, K)), sar.ErrorFeedback(make(SIZE, K))
        for _ in range(2):
            gradient = rng.integers(-99, 100, SIZE).astype(np.float32)
            mean, wanted = ours.step(xp.asarray(gradient), comm), theirs.step(gradient, comm)
            same(mean, wanted)
            np.testing.assert_array_equal(ours.residual.get(), theirs.residual)


def check_choices(comm, xp):
    stream = sar.SparseStream(np.arange(ENTRIES), np.ones(ENTRIES, np.float32), SIZE).to_device(xp)
    explained = comm.allgather(sar.explain(stream, comm))
    assert len({str(each) for each in explained}) == 1
    assert set(explained[0].copies) == set(explained[0].predicted) - {"alone"}
    if comm.size > 1:
        with pytest.raises(sar.MismatchError, match="memory of the streams"):
            sar.allreduce(stream.to_host() if comm.rank else stream, comm)


if __name__ == "__main__":
    module = array_module()
    check_sums(MPI.COMM_WORLD, module)
    check_reducers(MPI.COMM_WORLD, module)
    check_choices(MPI.COMM_WORLD, module)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{MPI.COMM_WORLD.size} rank(s) agree")
