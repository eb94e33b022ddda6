"""Compiled kernels that runs of the tests keep for the next clone: compiling all of them takes the processors some minutes.

The environment variable TEST_KERNELS names a folder, which `make` sets to one in the user's cache. It has one archive for each state of
the sources that kernels are compiled from. A run unpacks the archive beside the sources before its tests, unless kernels have been
compiled there, and packs it anew after them if more have been compiled. numba checks what it loads against the source, its own version
and the processor.
"""

import contextlib
import hashlib
import os
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

from sparseallreduce.atomic_file import atomic_file

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sparseallreduce"
COMPILED = ("*.nbi", "*.nbc")  # numba's indices and machine code
KEPT = 6  # archives, of the states that were used last


def folder() -> Path | None:
    """Return the folder of archives, or None where none is wanted, or numba writes elsewhere."""
    name = os.environ.get("TEST_KERNELS")
    return Path(name) if name and "NUMBA_CACHE_DIR" not in os.environ else None


def archive_in(place: Path) -> Path:
    """Return the path of the archive for the sources as they are: all files of kernels, since some are compiled into others."""
    state = hashlib.sha256(f"{version('numba')} {version('llvmlite')} {version('numpy')} {sys.version}".encode())
    for source in sorted(PACKAGE.rglob("*.py")):
        contents = source.read_bytes()
        if b"compilation import" in contents or "kernels" in source.parts:
            state.update(str(source.relative_to(PACKAGE)).encode() + contents)
    return place / f"{state.hexdigest()[:16]}.zip"


def compiled() -> list[Path]:
    return sorted(file for pattern in COMPILED for file in PACKAGE.rglob(pattern))


def unpack() -> None:
    """Put kept kernels beside the sources, if none are there and some are kept."""
    place = folder()
    if place is None or compiled():
        return
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(archive_in(place)) as archive:
        archive.extractall(PACKAGE)
        os.utime(archive.filename)


def pack() -> None:
    """Keep the kernels that are beside the sources, if they are more than those kept."""
    place = folder()
    if place is None:
        return
    path, files = archive_in(place), compiled()
    with contextlib.suppress(OSError):  # without them, the next run compiles
        place.mkdir(parents=True, exist_ok=True)
        if len(files) <= _count(path):
            return
        with atomic_file(path) as whole, zipfile.ZipFile(whole, "w") as archive:  # an index of other machine code would be believed
            for file in files:
                archive.write(file, file.relative_to(PACKAGE))
        for old in sorted(place.glob("*.zip"), key=lambda each: each.stat().st_mtime)[:-KEPT]:
            old.unlink()


def _count(archive: Path) -> int:
    try:
        with zipfile.ZipFile(archive) as kept:
            return len(kept.namelist())
    except (OSError, zipfile.BadZipFile):
        return 0
