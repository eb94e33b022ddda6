"""The same classifier trained by several ranks, each on samples of its own; all end with the same model.

mpiexec -n 2 python examples/estimator_ranks.py
"""

import numpy as np
from mpi4py import MPI
from scipy.sparse import random_array

from sparseallreduce.linear import LinearSVM

FEATURES = 1_000_000
comm = MPI.COMM_WORLD

truth = np.random.default_rng(0).standard_normal(FEATURES)  # what decides, the same on all ranks
rng = np.random.default_rng((1, comm.rank))  # samples, other ones on each
X = random_array((1000, FEATURES), density=1e-4, rng=rng, data_sampler=lambda size: np.ones(size)).tocsr()
y = np.where(X @ truth > 0, "yes", "no")

model = LinearSVM(max_iter=20, tol=None).fit(X, y)
accuracy = model.score(X, y)  # over the samples of all ranks, so all have to ask
if comm.rank == 0:
    sent = sum(epoch.bytes_sent for epoch in model.history_[0])
    print(f"{comm.size} ranks: accuracy {accuracy:.3f} on {1000 * comm.size:,} samples, {sent / 1e6:.1f} MB sent")
    print(f"one dense allreduce of the weights would send {2 * (comm.size - 1) / comm.size * FEATURES * 4 / 1e6:.0f} MB a rank")
