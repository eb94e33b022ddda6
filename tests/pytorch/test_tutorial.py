"""The tutorial about PyTorch: its files are written, its commands typed in their order, and they print what it shows."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_launch import FOREIGN, SETTINGS, launcher

pytest.importorskip("torch")

PAGE = Path(__file__).parent.parent.parent / "docs" / "tutorials" / "pytorch.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(line, folder):
    """Run one command of the page as a reader types it in ``folder``, and return what it prints."""
    found = launcher()
    paths = [str(Path(sys.executable).parent), str(found.mpiexec.parent), os.environ["PATH"]]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environment = inherited | SETTINGS | {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(PAGE.parent.parent.parent)}
    finished = subprocess.run(
        shlex.split(line), cwd=folder, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL, check=False
    )
    assert finished.returncode == 0, (line, finished.stdout, finished.stderr)
    return finished.stdout


@pytest.mark.release  # starts PyTorch twelve times
@pytest.mark.mpi
def test_the_programs_of_the_tutorial_print_what_it_shows(tmp_path, mpi_run):
    printed, compared = "", 0
    for language, block in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            (tmp_path / name[1]).write_text(block)
        elif language == "sh":
            printed = "".join(run(line, tmp_path) for line in block.splitlines())
        else:
            assert doctest.OutputChecker().check_output(block, printed, doctest.ELLIPSIS), (block, printed)
            compared += 1
    assert compared == 5
