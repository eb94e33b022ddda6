"""Every example runs, and says what it promises."""

import os
import re
import subprocess
import sys
import threading
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from mpi_launch import launcher

from sparseallreduce.linear.data.generate import generate

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
    ("torch_digits.py", 2): "2 ranks: test accuracy 0.9",
    ("recommender.py", 2): "whole tables would be 6 MB",
}

#: Those that need PyTorch.
WITH_TORCH = {"recommender.py", "torch_digits.py"}

#: What shortens a program for a test.
ARGUMENTS = {
    "perceptron.py": ("--epochs", "1", "--batch", "300"),
    "torch_digits.py": ("--epochs", "3"),
    "recommender.py": ("--rows", "25000", "--steps", "30"),
}


@pytest.mark.parametrize("name,ranks", [pytest.param(*program, marks=[pytest.mark.mpi] * (program[1] > 1)) for program in PROGRAMS])
def test_a_program_runs(name, ranks, request):
    if name in WITH_TORCH and find_spec("torch") is None:
        pytest.skip("no PyTorch here: `make test-torch` installs it")
    if ranks == 1:
        command = [sys.executable, str(EXAMPLES / name), *ARGUMENTS.get(name, ())]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(), timeout=300)
        assert run.returncode == 0, run.stderr
    else:
        run = request.getfixturevalue("mpi_run")(ranks, EXAMPLES / name, *ARGUMENTS.get(name, ()), timeout=300)
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


@pytest.fixture
def mirror(tmp_path):
    """The address of a server that has 600 samples under the name of the real set."""
    (tmp_path / "mirror").mkdir()
    generated = tmp_path / "mirror" / "url_combined.svm.bz2"
    generate("url-like", generated, samples=600, seed=1)
    given = generated.rename(tmp_path / "mirror" / "url_combined.bz2")
    (tmp_path / "here and there").mkdir()  # with its checksum, without which there must be as many samples as in the real set
    (tmp_path / "here and there" / "url_combined.bz2.sha256").write_text(f"{sha256(given.read_bytes()).hexdigest()}  {given.name}\n")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "mirror")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def url_script(tmp_path, mirror, *arguments, **settings):
    sizes = {"URL_SAMPLES": "600", "URL_TRAIN": "500", "URL_FOLDER": str(tmp_path / "here and there")}
    programs = {"PYTHON": sys.executable, "MPIEXEC": str(launcher().mpiexec)}
    environment = _environment() | programs | sizes | {"URL_MIRROR": mirror} | settings
    command = ["bash", str(EXAMPLES / "url.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240, stdin=subprocess.DEVNULL)


@pytest.mark.mpi
def test_the_url_set_is_fetched_split_and_trained_on(tmp_path, mirror, mpi_run):
    ran = url_script(tmp_path, mirror, "2", "--epochs", "2")
    assert ran.returncode == 0, ran.stderr
    assert "the first 500 samples to train on, 100 to test" in ran.stdout
    assert "500 samples, 100 to test, 3,231,961 features, 2 rank(s)" in ran.stdout
    assert "test accuracy 0." in ran.stdout and "published: 0.9844" in ran.stdout
    again = url_script(tmp_path, "http://127.0.0.1:9/", "1", "--solver", "cocoa", "--gap", "0.1")
    assert again.returncode == 0, again.stderr
    assert "splitting" not in again.stdout and "test accuracy 0." in again.stdout


@pytest.mark.mpi
def test_the_url_script_says_what_is_wrong(tmp_path, mirror, mpi_run):
    wrong = {
        "the number of ranks is 1 or more, not 'four'": (("four",), {}),
        "has 600 samples instead of 601": (("1",), {"URL_SAMPLES": "601"}),
        "URL_TRAIN must be above 0 and below": (("1",), {"URL_TRAIN": "600"}),
        "there is no python9": (("1",), {"PYTHON": "python9"}),
        "there is no mpiexec9": (("2",), {"MPIEXEC": "mpiexec9"}),
        "needed: set URL_FOLDER": (("1",), {"URL_SAMPLES": "9000000000"}),
    }
    for said, (arguments, settings) in wrong.items():
        ran = url_script(tmp_path, mirror, *arguments, **settings)
        assert ran.returncode != 0 and said in ran.stderr, (said, ran.stderr)
    assert not list((tmp_path / "here and there").glob("*.csr"))


def test_no_example_is_left_out():
    tested = {name for name, _ in PROGRAMS} | {"train.sh", "url.sh", "README.md"}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == tested
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in tested - {"README.md"})


def test_the_gallery_shows_every_program_and_of_those_that_it_does_not_run_what_tests_expect():
    shown = re.findall(r"```\{example\} (\S+)\n(.*?)```", (ROOT / "docs" / "gallery.md").read_text(), re.DOTALL)
    assert {name for name, _ in shown} == {name for name, _ in PROGRAMS} | {"train.sh"}
    for name, block in shown:
        options, _, output = block.partition("\n\n")
        assert bool(output) == (name in WITH_TORCH)
        if output:
            assert PROGRAMS[name, 2] in output
            assert f":arguments: {' '.join(ARGUMENTS[name])}" in options


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}
