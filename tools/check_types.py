"""Check that every public symbol has a known type, with pyright, for `make lint`: print those that have none, and exit with status 1.

Types of sparseallreduce.torch are known where PyTorch is installed, and not checked where it is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

COMMAND = ("-m", "pyright", "--verifytypes", "sparseallreduce", "--ignoreexternal", "--outputjson")


def main() -> int:
    """Print the symbols without a known type, and how many there are in all."""
    # pyright asks the first Python in PATH where packages are, and in a folder with ours would take it for the program to check.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, *COMMAND]
        run = subprocess.run(command, cwd=elsewhere, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    if not run.stdout.startswith("{"):
        sys.exit(f"error: pyright failed with status {run.returncode}: {run.stdout}{run.stderr}")
    found = json.loads(run.stdout)["typeCompleteness"]
    symbols = [each for each in found["symbols"] if each["isExported"]]
    if not symbols:
        sys.exit("error: pyright does not find sparseallreduce: install it with `make setup`")
    if find_spec("torch") is None:
        symbols = [each for each in symbols if not each["name"].startswith("sparseallreduce.torch")]
    unknown = [each for each in symbols if not each["isTypeKnown"] or each["isTypeAmbiguous"]]
    for each in unknown:
        print(each["name"], *(fault["message"].replace("\n", " ") for fault in each["diagnostics"]))
    known = len(symbols) - len(unknown)
    print(f"{known} of {len(symbols)} public symbols have a known type: {100 * known / max(len(symbols), 1):.1f} %")
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
