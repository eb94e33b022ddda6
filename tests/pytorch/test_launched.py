"""PyTorch's own launcher, which does not start MPI; its process group; and the workers of its DataLoader, which are no ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from launched import try_every_way_in

import sparseallreduce as sar
from sparseallreduce.runtime import launchers

HERE = Path(__file__).parent


def test_under_torchrun_every_way_in_says_that_mpi_does_not_know_of_it(tmp_path):
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", HERE / "launched.py"]

    ran = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False, stdin=subprocess.DEVNULL)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("raised by all") == 2


def test_a_process_group_of_several_without_mpi_is_noticed_by_itself(monkeypatch):
    """As after ``torch.multiprocessing.spawn``, which sets no variables."""
    for name in launchers._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    sar.allreduce(sar.SparseStream([1], [1.0], 4))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)

    with pytest.raises(sar.LauncherError, match=r"has started 3 processes \(the size of PyTorch's process group\)"):
        sar.allreduce(sar.SparseStream([1], [1.0], 4))


def test_every_way_in(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)

    try_every_way_in()


def test_workers_of_a_dataloader_compute_alone(mpi_run):
    ran = mpi_run(2, "-c", "import launched; launched.load_by_workers()", env={"PYTHONPATH": str(HERE)}, timeout=240)

    assert ran.stdout.count("loaded") == 2, (ran.stdout, ran.stderr)
