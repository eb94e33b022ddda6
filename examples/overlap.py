"""Communication while the program computes: the sum of one step is in flight while the gradient of the next is computed.

mpiexec -n 2 python examples/overlap.py
"""

import time

import numpy as np
from mpi4py import MPI

import sparseallreduce as sar

SIZE, ENTRIES, STEPS = 4_000_000, 40_000, 20
comm = MPI.COMM_WORLD
rng = np.random.default_rng(comm.rank)
work = rng.random((300, 300))


def gradient():
    """Stands for what takes the time of a step."""
    for _ in range(5):
        np.linalg.norm(work @ work)
    indices = np.sort(rng.choice(SIZE, ENTRIES, replace=False, shuffle=False))
    return sar.SparseStream(indices, rng.random(ENTRIES, np.float32), SIZE)


def blocking():
    for _ in range(STEPS):
        sar.allreduce(gradient())


def overlapped():
    """A step applies the sum of the step before it: one step stale."""
    request = sar.iallreduce(gradient())
    for _ in range(STEPS - 1):
        following = gradient()  # meanwhile the request is on its way
        request.wait()
        request = sar.iallreduce(following)
    request.wait()


for name, run in (("blocking", blocking), ("overlapped", overlapped)):
    run()  # compiles, and meets the other ranks
    comm.Barrier()
    start = time.perf_counter()
    run()
    seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    if comm.rank == 0:
        print(f"{name}: {1e3 * seconds / STEPS:.1f} ms a step")
