"""Two ranks train on the device as on the host; run under mpiexec and numba's simulator."""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "cuda"))
import device_arrays as xp
from mpi4py import MPI
from scipy.sparse import csr_array

from sparseallreduce.errors import DatasetError, MismatchError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels.cuda import rows
from sparseallreduce.linear.models import Logistic
from sparseallreduce.linear.strategies import STRATEGIES
from sparseallreduce.linear.training.schedules import Constant
from sparseallreduce.linear.training.trainer import Options, Trainer
from sparseallreduce.linear.weights import Descent
from sparseallreduce.runtime import setup

comm = MPI.COMM_WORLD


def trained(name, device, **options):
    strategy = STRATEGIES[name](samples(), comm, Descent(l2=0.01, intercept=True), device=device, **options)
    trainer = Trainer(Logistic(), strategy, Constant(0.3), Options(1, 3))
    return trainer, list(trainer.run())


def samples():
    rng = np.random.default_rng(comm.rank)
    held = csr_array(np.where(rng.random((6, 8)) < 0.4, rng.standard_normal((6, 8)), 0))
    return Dataset.of_ranks(held, rng.choice([-1.0, 1.0], 6), comm)


def refused(call, kind, text):
    try:
        call()
    except kind as error:
        found = str(error)
    assert text in found, found
    assert len(set(comm.allgather(found))) == 1


def main():
    sys.modules["cupy"] = xp
    xp.cuda.Device.mem_info, xp.cuda.runtime = (1 << 30, 1 << 30), SimpleNamespace(getDeviceCount=lambda: 1)
    rows.LANES = 1
    setup.module_in_use = lambda: None  # the model's constants are those of data sheets: to measure the simulator takes minutes
    warnings.simplefilter("ignore")
    for name, options in (("sparse", {}), ("dense", {}), ("oktopk", {"density": 0.3}), ("gtopk", {"density": 0.3})):
        ours, (epoch,) = trained(name, "gpu", **options)
        theirs, (wanted,) = trained(name, "cpu", **options)
        assert abs(epoch.loss - wanted.loss) < 1e-5 and epoch.train_accuracy == wanted.train_accuracy
        np.testing.assert_allclose(ours.weights.to_array(), theirs.weights.to_array(), rtol=1e-4, atol=1e-6)
        assert len(set(comm.allgather(ours.weights.to_array().tobytes()))) == 1
        state = ours.strategy.state()
        if comm.rank == 0:
            assert all(type(value) is np.ndarray for value in state.values() if hasattr(value, "shape"))
    refused(lambda: trained("sparse", "gpu" if comm.rank else "cpu"), MismatchError, "one device")
    for name, least in (("sparse", 400), ("sparse", 900), ("dense", 900), ("oktopk", 900)):  # where not even one sample fits, and one does
        xp.cuda.Device.mem_info = (least if comm.rank else 1 << 30, 1 << 30)
        refused(lambda name=name: trained(name, "gpu"), DatasetError, "use fewer samples per step")
    xp.cuda.Device.mem_info = (1 << 30, 1 << 30)
    trained("sparse", "gpu")
    print(f"rank {comm.rank} of {comm.size} is done")


if __name__ == "__main__":
    main()
