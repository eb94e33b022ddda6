"""Compiled kernels that runs of the tests keep for other clones: compiling all of them takes the processors some minutes.

The environment variable TEST_KERNELS names a folder, which `make` sets to one in the user's cache. It has archives of what was compiled
from a source file, one for each state of that file and of those from which it takes parts of its kernels. A run unpacks archives beside
the sources before its tests, where nothing has been compiled, and packs them anew after its tests where more has been. numba checks what
it loads against the source file, its own version and the processor.
"""

import contextlib
import hashlib
import os
import re
import sys
import zipfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

from sparseallreduce.atomic_file import atomic_file

PACKAGE = Path(__file__).resolve().parents[1] / "sparseallreduce"
KEPT = 4  # states of a source, those used last
_IMPORT = re.compile(rb"^from sparseallreduce\.([\w.]+) import|^import sparseallreduce\.([\w.]+)", re.MULTILINE)


def unpack() -> None:
    """Put kept kernels beside those sources that have none."""
    place = folder()
    for source in sources() if place else []:
        if not compiled(source):
            with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(archive(place, source)) as kept:
                kept.extractall(source.parent / "__pycache__")
                os.utime(kept.filename)


def pack() -> None:
    """Keep the kernels beside each source, if they are more than those kept of the same state."""
    place = folder()
    for source in sources() if place else []:
        path, files = archive(place, source), compiled(source)
        with contextlib.suppress(OSError):  # the next run compiles
            if len(files) > _count(path):
                place.mkdir(parents=True, exist_ok=True)
                with atomic_file(path) as whole, zipfile.ZipFile(whole, "w") as kept:  # an index is of its own machine code alone
                    for file in files:
                        kept.write(file, file.name)
                states = place.glob(f"{path.name.rpartition('-')[0]}-*.zip")
                for old in sorted(states, key=lambda each: each.stat().st_mtime)[:-KEPT]:
                    old.unlink()


def folder() -> Path | None:
    """Return the folder of archives, or None where none is wanted, or numba writes elsewhere."""
    name = os.environ.get("TEST_KERNELS")
    return Path(name) if name and "NUMBA_CACHE_DIR" not in os.environ else None


def sources() -> list[Path]:
    """Return the source files of kernels and of parts of kernels."""
    return list(_contents(PACKAGE))


@cache
def _contents(package: Path) -> dict[Path, bytes]:
    contents = ((file, file.read_bytes()) for file in sorted(package.rglob("*.py")))
    return {file: text for file, text in contents if "kernels" in file.parts or b"compilation import" in text}


def compiled(source: Path) -> list[Path]:
    """Return numba's index and machine code of the kernels of a source file."""
    return sorted(file for suffix in ("nbi", "nbc") for file in (source.parent / "__pycache__").glob(f"{source.stem}.*.{suffix}"))


def archive(place: Path, source: Path) -> Path:
    """Return the path of the archive for a source file as it and those that it imports from are now."""
    state = hashlib.sha256(f"{version('numba')} {version('llvmlite')} {version('numpy')} {sys.version}".encode())
    for file in sorted(_with_imported(source)):
        state.update(str(file.relative_to(PACKAGE)).encode() + _contents(PACKAGE)[file])
    return place / f"{'.'.join(source.relative_to(PACKAGE).with_suffix('').parts)}-{state.hexdigest()[:16]}.zip"


def _with_imported(source: Path) -> set[Path]:
    """Return a source file and all files of kernels that it imports, those that these import included."""
    found, left = set(), {source}
    while left:
        file = left.pop()
        found.add(file)
        left |= _imported(file) - found
    return found


@cache
def _imported(source: Path) -> set[Path]:
    contents = _contents(PACKAGE)
    names = [(first or second).decode().split(".") for first, second in _IMPORT.findall(contents[source])]
    paths = [PACKAGE.joinpath(*name) for name in names]
    return contents.keys() & ({path.with_suffix(".py") for path in paths} | {path / "__init__.py" for path in paths})


def _count(kept: Path) -> int:
    try:
        with zipfile.ZipFile(kept) as archive:
            return len(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return 0
