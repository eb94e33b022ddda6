"""Scripts for DistributedDataParallel, Lightning, Accelerate and Transformers run as ranks of MPI, with PyTorch's sums and with ours."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
SCRIPTS = {
    "ddp_digits.py": "torch",
    "mnist_digits.py": "torch",
    "word_language_model.py": "torch",
    "lightning_digits.py": "lightning",
    "accelerate_digits.py": "accelerate",
    "trainer_text.py": "transformers",
}

pytestmark = pytest.mark.mpi


def loss_of(output: str, ranks: int) -> float:
    found = re.search(rf"test loss ([0-9.]+) of {ranks} ranks", output)
    assert found, output
    return float(found[1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_learns_as_much_with_sums_over_mpi(script, mpi_run):
    package = SCRIPTS[script]
    if find_spec(package) is None:
        if os.environ.get("REQUIRE_FRAMEWORKS"):
            pytest.fail(f"{package} is not installed here: `make test-frameworks` installs it")
        pytest.skip(f"no {package} here: `make test-frameworks` installs it")

    def run(*arguments):
        ran = mpi_run(2, "-m", "sparseallreduce.torch.run", str(FOLDER / script), *arguments, timeout=300)
        return loss_of(ran.stdout, 2)

    plain, dense, sparse = run(), run("--reducer", "dense"), run("--reducer", "oktopk")
    print(f"{script}: test loss {plain} with PyTorch's sums, {dense} with dense and {sparse} with sparse ones")
    assert dense == pytest.approx(plain, rel=1e-3)
    assert plain != sparse < plain + 0.25


def test_accelerate_prepares_our_optimisers(mpi_run):
    if find_spec("accelerate") is None:
        if os.environ.get("REQUIRE_FRAMEWORKS"):
            pytest.fail("accelerate is not installed here: `make test-frameworks` installs it")
        pytest.skip("no accelerate here: `make test-frameworks` installs it")

    ran = mpi_run(2, "-m", "sparseallreduce.torch.run", str(FOLDER / "accelerate_optimizers.py"), timeout=300)

    assert ran.stdout.count("prepared") == 2, (ran.stdout, ran.stderr)


def test_a_script_ends_at_the_same_loss_as_under_torchrun(mpi_run):
    pytest.importorskip("torch")
    script = str(FOLDER / "ddp_digits.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    theirs = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, stdin=subprocess.DEVNULL)

    ours = mpi_run(2, "-m", "sparseallreduce.torch.run", script, timeout=300)

    assert loss_of(ours.stdout, 2) == loss_of(theirs.stdout, 2)
