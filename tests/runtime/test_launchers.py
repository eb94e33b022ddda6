"""Processes that a launcher has started together and that MPI does not connect: every way in without ``comm`` says so."""

import os
import shlex
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from mpi_launch import FOREIGN

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import Dataset, Hinge, LinearRegression, LinearSVM, LogisticRegression
from sparseallreduce.linear.solvers.cocoa import CoCoA
from sparseallreduce.optim import OkTopkSGD
from sparseallreduce.runtime import launchers

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "64", "SLURM_NPROCS": "64", "SLURM_PROCID": "0"}  # of a batch script

STREAM = sar.SparseStream([1, 5], [2.0, 3.0], 40)
DENSE = np.arange(40, dtype=np.float32)


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch):
    """Without the variables of launchers under which these tests may run."""
    for name in [name for name in os.environ if name in launchers._VARIABLES or name == launchers.CHECK]:
        monkeypatch.delenv(name)


@pytest.fixture
def launched(monkeypatch):
    def set_variables(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


SEVERAL = {
    "torchrun": (TORCHRUN, "torchrun has started 2 processes (WORLD_SIZE=2)"),
    "accelerate": ({"WORLD_SIZE": "8", "RANK": "3"}, "a launcher for PyTorch, such as torchrun, has started 8 processes (WORLD_SIZE=8)"),
    "lightning": ({"WORLD_SIZE": "8", "LOCAL_RANK": "3"}, "has started 8 processes (WORLD_SIZE=8)"),
    "openmpi": ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpiexec has started 4 processes (OMPI_COMM_WORLD_SIZE=4)"),
    "pmi": ({"PMI_SIZE": "3", "PMI_RANK": "0"}, "mpiexec has started 3 processes (PMI_SIZE=3)"),
    "hydra": ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}, "mpiexec has started 2 processes (MPI_LOCALNRANKS=2)"),
    "mvapich": ({"MV2_COMM_WORLD_SIZE": "2"}, "mpiexec has started 2 processes (MV2_COMM_WORLD_SIZE=2)"),
    "pals": ({"PALS_LOCAL_SIZE": "2", "PALS_RANKID": "0"}, "mpiexec of PALS has started 2 processes (PALS_LOCAL_SIZE=2)"),
    "pals, by a rank": ({"PALS_RANKID": "3"}, "mpiexec of PALS has started 4 processes (at least, as PALS_RANKID=3)"),
    "pmix, by a rank": ({"PMIX_RANK": "1"}, "a launcher that speaks PMIx has started 2 processes (at least, as PMIX_RANK=1)"),
    "srun": (SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, "srun has started 2 processes (SLURM_STEP_NUM_TASKS=2)"),
    "srun, by a rank": ({"SLURM_PROCID": "5"}, "srun has started 6 processes (at least, as SLURM_PROCID=5)"),
    "flux": ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, "flux run has started 2 processes (FLUX_JOB_SIZE=2)"),
    "jsrun": ({"JSM_NAMESPACE_SIZE": "2"}, "jsrun has started 2 processes (JSM_NAMESPACE_SIZE=2)"),
    "horovod": ({"HOROVOD_SIZE": "2"}, "horovodrun has started 2 processes (HOROVOD_SIZE=2)"),
    "torchrun in a step": (SLURM | {"SLURM_STEP_NUM_TASKS": "1"} | TORCHRUN, "torchrun has started 2 processes"),
    "torchrun in an mpiexec of one": ({"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1"} | TORCHRUN, "torchrun has started 2 processes"),
}


@pytest.mark.parametrize("variables, text", SEVERAL.values(), ids=SEVERAL)
def test_several_processes_that_mpi_does_not_connect_are_an_error(launched, variables, text):
    launched(variables)

    with pytest.raises(sar.LauncherError) as caught:
        sar.allreduce(STREAM)

    assert isinstance(caught.value, RuntimeError)
    assert text in str(caught.value)


ALONE = {
    "nobody": {},
    "a batch script": SLURM,
    "a step of one": SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"},
    "torchrun of one": TORCHRUN | {"WORLD_SIZE": "1"},
    "no rank": {"WORLD_SIZE": "2"},
    "mpiexec of one": {"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1", "MPI_LOCALNRANKS": "1", "PMI_RANK": "0"},
    "mpiexec of one in each task": SLURM | {"SLURM_STEP_NUM_TASKS": "64", "PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1"},
    "the check turned off": TORCHRUN | {"SPARSEALLREDUCE_LAUNCHER_CHECK": "0"},
    "no number": {"PMI_SIZE": "many", "OMPI_COMM_WORLD_SIZE": "-2", "SLURM_STEP_NUM_TASKS": "", "MPI_LOCALNRANKS": "²"},
    "the first of unknown many": {"PMIX_RANK": "0", "PALS_RANKID": "0"},
}


@pytest.mark.parametrize("variables", ALONE.values(), ids=ALONE)
def test_a_process_alone_is_left_alone(launched, variables):
    launched(variables)

    assert sar.allreduce(STREAM).nnz == 2


def test_the_check_is_on_unless_it_is_turned_off(launched):
    launched(TORCHRUN | {"SPARSEALLREDUCE_LAUNCHER_CHECK": "1"})

    with pytest.raises(sar.LauncherError):
        sar.allreduce(STREAM)


CALLS = {
    "allreduce": lambda: sar.allreduce(STREAM),
    "of a list": lambda: sar.allreduce([STREAM, STREAM]),
    "of no list": lambda: sar.allreduce([]),
    "with options": lambda: sar.allreduce(STREAM, algorithm="ssar_ring", timeout=3.0),
    "with a wrong argument": lambda: sar.allreduce("no stream"),
    "iallreduce": lambda: sar.iallreduce(STREAM),
    "iallreduce of a list": lambda: sar.iallreduce([STREAM, STREAM]),
    "allreduce_init": lambda: sar.allreduce_init(STREAM),
    "allreduce_init of fixed indices": lambda: sar.allreduce_init(STREAM, fixed_indices=True),
    "explain": lambda: sar.explain(STREAM),
    "explain_reducer": lambda: sar.explain_reducer(40, 2),
    **{name: lambda name=name: getattr(sar, name)(40, 2).allreduce(DENSE) for name in ("OkTopk", "GTopk", "TopkA", "TopkDSA", "Auto")},
    "reducer.iallreduce": lambda: sar.HiTopK(40, 2).iallreduce(DENSE),
    "ErrorFeedback.step": lambda: sar.ErrorFeedback(sar.GaussianK(40, 2)).step(DENSE),
    "ErrorFeedback.istep": lambda: sar.ErrorFeedback(sar.TopkA(40, 2)).istep(DENSE),
    "optim": lambda: OkTopkSGD([DENSE.copy()], learning_rate=0.1, density=0.1),
    "LogisticRegression.fit": lambda: LogisticRegression().fit(np.eye(4), [0, 1, 0, 1]),
    "LinearSVM.partial_fit": lambda: LinearSVM().partial_fit(np.eye(4), [0, 1, 0, 1], classes=[0, 1]),
    "Dataset.of_ranks": lambda: Dataset.of_ranks(np.eye(4), [0, 1, 0, 1]),
    "CoCoA": lambda: CoCoA(Dataset.from_scipy(np.eye(4), [-1, 1, -1, 1]), Hinge(), l2=0.1),
    "LinearRegression.fit": lambda: LinearRegression().fit(np.eye(4), [0, 1, 0, 1]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_way_in_without_comm_says_so(launched, call):
    launched(TORCHRUN)

    with pytest.raises(sar.LauncherError, match="torchrun has started 2 processes"):
        call()


def test_who_passes_a_communicator_knows_what_it_is(launched):
    MPI = pytest.importorskip("mpi4py.MPI")
    launched(TORCHRUN)

    for comm in (sar.SERIAL, MPI.COMM_WORLD, MPI.COMM_SELF):
        assert sar.allreduce(STREAM, comm).nnz == 2
        assert sar.TopkA(40, 2).allreduce(DENSE, comm).update.nnz == 2
        LogisticRegression(comm=comm, max_iter=2, tol=None).fit(np.eye(4), [0, 1, 0, 1])


def test_the_error_names_the_library_and_a_command_that_works(launched, monkeypatch):
    MPI = pytest.importorskip("mpi4py.MPI")
    launched(TORCHRUN)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "train.py", "--name", "two words"])
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "two words"])

    with pytest.raises(sar.LauncherError) as caught:
        sar.allreduce(STREAM)

    vendor, version = MPI.get_vendor()
    text = str(caught.value)
    assert f"mpi4py has loaded {vendor} {'.'.join(map(str, version))}" in text
    command = text.partition("What works: ")[2].partition(". Processes that")[0]
    program, *arguments = shlex.split(command)
    assert program.endswith("mpiexec") or program == "the"
    run = ["-m", "sparseallreduce.torch.run"]
    assert arguments[-9:] == ["-n", "2", os.path.basename(sys.executable), "-u", *run, "train.py", "--name", "two words"]
    assert "SPARSEALLREDUCE_LAUNCHER_CHECK=0" in text


@pytest.mark.parametrize(
    "argv, rest, expected",
    [
        (["-m", "package.train", "--x"], ["--x"], ["-m", "sparseallreduce.torch.run", "-m", "package.train", "--x"]),
        (["-c", "pass"], [], ["-c", "pass"]),
        (["-m", "sparseallreduce.torch.run", "train.py"], ["train.py"], ["-m", "sparseallreduce.torch.run", "train.py"]),
        (["train.py", "--x"], ["--changed"], ["train.py", "--x"]),
    ],
)
def test_the_command_for_torchrun_puts_the_runner_before_the_script(launched, monkeypatch, argv, rest, expected):
    pytest.importorskip("mpi4py.MPI")
    launched(TORCHRUN)
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    monkeypatch.setattr(sys, "argv", ["script", *rest])

    with pytest.raises(sar.LauncherError) as caught:
        sar.allreduce(STREAM)

    command = str(caught.value).partition("What works: ")[2].partition(". Processes that")[0]
    assert shlex.split(command)[-len(expected) - 1 :] == [os.path.basename(sys.executable), *expected]


def test_srun_is_told_how_it_starts_ranks(launched):
    MPI = pytest.importorskip("mpi4py.MPI")
    launched(SLURM | {"SLURM_STEP_NUM_TASKS": "2"})

    with pytest.raises(sar.LauncherError, match=f"srun --mpi={'pmix' if MPI.get_vendor()[0] == 'Open MPI' else 'pmi2'} "):
        sar.allreduce(STREAM)


SAMPLES = "1 1:0.5 3:1\n0 2:1\n1 1:2\n0 2:2\n"
COMMANDS = {
    "train": ["train", "{data}", "--model", "logistic", "--epochs", "1"],
    "bench": ["bench", "--size", "100", "--density", "0.1"],
    "bench of reducers": ["bench", "--size", "100", "--density", "0.1", "--lossy"],
    "predict": ["predict", "{data}", "{data}"],
    "convert": ["convert", "{data}", "{out}"],
    "generate": ["generate", "uniform", "{out}", "--samples", "4", "--features", "4"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_commands_say_so_in_one_line_and_once(launched, tmp_path, arguments, rank):
    launched(TORCHRUN | {"RANK": str(rank)})
    (tmp_path / "data.svm").write_text(SAMPLES)
    places = {"data": tmp_path / "data.svm", "out": tmp_path / "out"}

    result = CliRunner().invoke(main, [argument.format(**places) for argument in arguments])

    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()
    if rank == 0:
        assert result.output.startswith("Error: torchrun has started 2 processes")
        assert result.output.count("\n") == 1
    else:
        assert result.output == ""


def test_doctor_calls_it_a_problem(launched):
    launched(TORCHRUN)

    result = CliRunner().invoke(main, ["doctor"])

    assert result.exit_code == 1
    assert "PROBLEM      torchrun has started 2 processes (WORLD_SIZE=2), but MPI connects this one with no other" in result.output


def test_a_command_needs_no_mpi_in_a_step_of_pmix(tmp_path):
    """MPICH ends a process that has this variable as it starts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    program = [sys.executable, "-m", "sparseallreduce", "generate", "uniform", tmp_path / "out.svm", "--samples", "4", "--features", "4"]

    ran = subprocess.run(program, capture_output=True, text=True, check=False, env=kept | {"PMIX_RANK": "0"})

    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out.svm").exists()


def test_the_rank_of_a_launcher_is_known_without_mpi(launched):
    assert (launchers.launched_rank(), launchers.launched_ranks()) == (0, None)
    launched(SLURM | {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"})
    assert (launchers.launched_rank(), launchers.launched_ranks()) == (3, 4)
    launched({"PMI_RANK": "1", "PMI_SIZE": "2", "WORLD_SIZE": "7"})
    assert (launchers.launched_rank(), launchers.launched_ranks()) == (1, 2)
    launched({"RANK": "5"})
    assert (launchers.launched_rank(), launchers.launched_ranks()) == (5, 7)
