"""A loss of your own: three definitions, and all of the trainer works with it. Here quantile regression.

mpiexec -n 2 python examples/own_model.py        or on one process, without mpiexec
"""

import numpy as np
from scipy.sparse import csr_array

import sparseallreduce as sar
from sparseallreduce.linear import Constant, Dataset, Descent, LinearModel, Options, SparseStrategy, Trainer


class Quantile(LinearModel):
    """The score that a share of 90 % of the labels lies below."""

    name = "quantile"
    classifies = False

    def loss(self, scores, labels):
        return np.where(labels > scores, 0.9 * (labels - scores), 0.1 * (scores - labels))

    def derivative(self, scores, labels):
        return np.where(labels > scores, -0.9, 0.1)


try:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
except ImportError:
    comm = sar.SERIAL

rng = np.random.default_rng((0, comm.rank))
x = rng.random((2000, 1))
y = 3 * x[:, 0] + rng.random(2000)  # 90 % lie below 3 x + 0.9
samples = Dataset.from_scipy(csr_array(x), y, first_sample=2000 * comm.rank, total_samples=2000 * comm.size)
strategy = SparseStrategy(samples, comm, Descent(intercept=True))
trainer = Trainer(Quantile(), strategy, Constant(0.1), Options(epochs=20, batch_size=20))
epochs = list(trainer.run())
slope, intercept = trainer.weights.to_array()
if comm.rank == 0:
    print(f"loss {epochs[-1].loss:.4f}; 90 % of the labels lie below {slope:.1f} x + {intercept:.1f}")
