"""Every example runs, and says what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_launch import launcher

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

#: What each program prints, on how many ranks; on one, it is started without mpiexec.
PROGRAMS = {
    ("estimator.py", 1): "'click here and win watches': spam",
    ("estimator_ranks.py", 2): "2 ranks: accuracy 1.000 on 2,000 samples",
    ("own_model.py", 2): "90 % of the labels lie below 3",
    ("own_model.py", 1): "90 % of the labels lie below 3",
    ("own_sgd.py", 4): "MB, dense would be",
    ("overlap.py", 2): "overlapped:",
    ("parameter_server.py", 3): "epoch 3: loss 0.",
    ("embedding_table.py", 2): "20 steps sent",
    ("perceptron.py", 2): "MSTopK SGD           loss ",
}

#: What shortens a program for a test.
ARGUMENTS = {"perceptron.py": ("--epochs", "1", "--batch", "300")}


@pytest.mark.parametrize("name,ranks", [pytest.param(*program, marks=[pytest.mark.mpi] * (program[1] > 1)) for program in PROGRAMS])
def test_a_program_runs(name, ranks, request):
    if ranks == 1:
        command = [sys.executable, str(EXAMPLES / name), *ARGUMENTS.get(name, ())]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(), timeout=120)
        assert run.returncode == 0, run.stderr
    else:
        run = request.getfixturevalue("mpi_run")(ranks, EXAMPLES / name, *ARGUMENTS.get(name, ()), timeout=120)
    assert PROGRAMS[name, ranks] in run.stdout, run.stdout


def test_the_commands_run(tmp_path, mpi_run):
    environment = _environment() | {"PYTHON": sys.executable, "MPIEXEC": str(launcher().mpiexec), "TMPDIR": str(tmp_path)}
    command = ["sh", str(EXAMPLES / "train.sh")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stderr
    assert "accuracy" in run.stdout
    (folder,) = tmp_path.iterdir()
    assert (folder / "comparison.png").stat().st_size > 10_000
    assert len((folder / "predictions.txt").read_text().splitlines()) == 501


def test_no_example_is_left_out():
    tested = {name for name, _ in PROGRAMS} | {"train.sh", "README.md"}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == tested
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in tested - {"README.md"})


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}
