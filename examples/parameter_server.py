"""An asynchronous parameter server: one rank holds the model, and the others train on it without waiting for each other.

mpiexec -n 3 python examples/parameter_server.py
"""

import tempfile
from pathlib import Path

from mpi4py import MPI

from sparseallreduce.linear import (
    AsynchronousParameterServer,
    Constant,
    Descent,
    Logistic,
    Options,
    Trainer,
    generate,
    load,
    read_on_workers,
    two_classes,
)

comm = MPI.COMM_WORLD
with tempfile.TemporaryDirectory() as own:
    path = Path(comm.bcast(own)) / "samples.svm"  # of rank 0
    if comm.rank == 0:
        generate("url-like", path, samples=3000, features=50_000)
    comm.Barrier()
    samples, _ = read_on_workers(comm, 1, lambda workers: load(path, comm=workers, n_features=50_000))
    comm.Barrier()
samples, _ = two_classes(samples, comm)
strategy = AsynchronousParameterServer(samples, comm, Descent(l2=1e-6), servers=1)
trainer = Trainer(Logistic(), strategy, Constant(0.5), Options(epochs=3, batch_size=20))
for epoch in trainer.run():
    if comm.rank == 0:
        print(f"epoch {epoch.epoch}: loss {epoch.loss:.4f}, accuracy {epoch.train_accuracy:.4f}, {epoch.measures}")
