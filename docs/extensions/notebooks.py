"""Sphinx extension for the tutorials: their cells run as the site is built, and what they print is kept until the library changes."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build"


def digest_of_library() -> str:
    """Return a digest of the package's source, which changes whenever a cell may print something else."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "sparseallreduce").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _folder_of_outputs() -> str:
    """Return the folder with the kept outputs of cells; remove those of earlier states of the library."""
    kept = BUILD / "notebooks" / digest_of_library()
    for other in kept.parent.glob("*"):
        if other != kept:
            shutil.rmtree(other)
    kept.mkdir(parents=True, exist_ok=True)
    return str(kept)


def _give_kernels_their_start() -> None:
    """Let the kernels of notebooks run commands_of_cells.py first, and print no messages of their own."""
    startup = BUILD / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).parent / "commands_of_cells.py", startup / "00-commands.py")
    (startup.parent / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 'ERROR'")
    logging.getLogger("traitlets").setLevel(logging.WARNING)


def _configure(_app: Any, config: Any) -> None:
    """Let cells find the commands of this environment, whose tables fit the page."""
    _give_kernels_their_start()
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    os.environ.update(
        IPYTHONDIR=str(BUILD / "ipython"), COLUMNS="88", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTHONUNBUFFERED="1"
    )
    config.nb_execution_mode = "cache"
    config.nb_execution_cache_path = _folder_of_outputs()
    config.nb_execution_in_temp = True
    config.nb_execution_raise_on_error = True
    config.nb_execution_timeout = 600
    config.nb_merge_streams = True


def setup(app: Any) -> None:
    app.setup_extension("myst_nb")
    app.connect("config-inited", _configure)
