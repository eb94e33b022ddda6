"""Data-parallel SGD with nothing of this library but the allreduce: the gradient of a batch is a sparse stream.

mpiexec -n 4 python examples/own_sgd.py
"""

import numpy as np
from mpi4py import MPI
from scipy.sparse import random_array

import sparseallreduce as sar

FEATURES, BATCH, RATE = 200_000, 50, 1.0
comm = MPI.COMM_WORLD
rng = np.random.default_rng((1, comm.rank))
X = random_array((2000, FEATURES), density=5e-4, rng=rng, dtype=np.float32).tocsr()
y = np.where(X @ np.random.default_rng(0).standard_normal(FEATURES) > 0, 1.0, -1.0)

w = np.zeros(FEATURES, np.float32)
with sar.trace() as traffic:
    for _ in range(200):
        rows = rng.integers(len(y), size=BATCH)
        coefficients = -y[rows] / (1 + np.exp(y[rows] * (X[rows] @ w)))  # of logistic regression
        batch = X[rows].multiply(coefficients[:, None] / (BATCH * comm.size)).tocoo()
        gradient = sar.SparseStream.from_coo(batch.col, batch.data.astype(np.float32), FEATURES)  # adds up what is there twice
        total = sar.allreduce(gradient)
        w[total.indices] -= RATE * total.values

right = comm.allreduce(int(((X @ w > 0) == (y > 0)).sum()))
if comm.rank == 0:
    dense = 2 * w.nbytes * (comm.size - 1) // comm.size * 200
    print(f"accuracy {right / len(y) / comm.size:.3f}; rank 0 sent {traffic.bytes_sent / 1e6:.1f} MB, dense would be {dense / 1e6:.1f} MB")
assert len(set(comm.allgather(w.tobytes()))) == 1, "replicas never drift apart"
