"""Synchronise an embedding table: a step touches few of its rows, and the gradients of these rows are added up.

mpiexec -n 2 python examples/embedding_table.py
"""

import numpy as np
from mpi4py import MPI

import sparseallreduce as sar

WORDS, WIDTH, RATE = 50_000, 64, 0.5
comm = MPI.COMM_WORLD
rng = np.random.default_rng((1, comm.rank))
table = np.random.default_rng(0).standard_normal((WORDS, WIDTH)).astype(np.float32)  # the same on all ranks

with sar.trace() as traffic:
    for _ in range(20):
        tokens = rng.zipf(1.3, 512) % WORDS  # of this rank's sentences; words occur by their frequency
        slopes = table[tokens] / len(tokens)  # of the loss |table[token]|^2 / 2: stands for a network's back-propagation
        words, places = np.unique(tokens, return_inverse=True)
        rows = np.zeros((len(words), WIDTH), np.float32)
        np.add.at(rows, places, slopes)
        total = sar.allreduce(sar.SparseStream(words, rows, WORDS))  # values of shape (words, WIDTH)
        table[total.indices] -= RATE * total.values / comm.size

assert len(set(comm.allgather(table.tobytes()))) == 1
if comm.rank == 0:
    dense = 20 * 2 * table.nbytes * (comm.size - 1) // comm.size
    print(f"20 steps sent {traffic.bytes_sent / 1e6:.1f} MB a rank; the whole table each time would be {dense / 1e6:.0f} MB")
