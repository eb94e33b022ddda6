"""Train on a binary file of several times the memory that the ranks may take together; as root, on Linux.

    python bench/larger_than_memory.py --ranks 1 --ranks 2

All ranks are put into a memory control group (version 1 or 2) of a share of the file's size, from which the kernel would kill a process
that cannot do with it. The page cache is the group's as well, so the file itself does not fit. The model must be the same to the bit as
that of a run without a limit. With --values ones, the file holds no values: they are made.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np

from sparseallreduce.linear import load_model

GROUPS = Path("/sys/fs/cgroup")
KINDS = {"drawn": "webspam-like", "ones": "url-like"}
NONZEROS = {"drawn": 3730, "ones": 116}  # a sample


class Group:
    """A control group with a limit of memory."""

    def __init__(self, limit: int) -> None:
        second = (GROUPS / "cgroup.controllers").exists() and "memory" in (GROUPS / "cgroup.controllers").read_text().split()
        parent = GROUPS if second else GROUPS / "memory"
        self.folder = parent / f"larger-than-memory-{secrets.token_hex(4)}"
        self._limit, self._peak = ("memory.max", "memory.peak") if second else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
        if second:
            (parent / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir()
        (self.folder / self._limit).write_text(str(limit))

    def enter(self) -> None:
        """Put this process, and so all that it starts, into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        """Bytes at most, page cache included."""
        return int((self.folder / self._peak).read_text())

    @property
    def anonymous(self) -> int:
        """Bytes that are now of no file."""
        words = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return int(words.get("anon", words.get("total_rss", 0))) + int(words.get("shmem", words.get("total_shmem", 0)))


@contextmanager
def limited(limit: int) -> Iterator[Group]:
    group = Group(limit)
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                group.folder.rmdir()
                break
            except OSError:  # until the kernel has seen the last process end
                time.sleep(0.1)


def made(data: Path, gigabytes: float, values: str) -> Path:
    """A file of about this size."""
    samples = int(gigabytes * 1e9 / (NONZEROS[values] * (8 if values == "drawn" else 4)))
    arguments = ["generate", KINDS[values], str(data), "--samples", str(samples), "--features", "1000000"]
    subprocess.run([sys.executable, "-m", "sparseallreduce", *arguments], check=True)
    return data


def trained(data: Path, model: Path, ranks: int, group: Group | None) -> tuple[float, int]:
    """Seconds of a run, and the most memory that was of no file."""
    forget(data)
    command = [sys.executable, "-m", "sparseallreduce", "train", str(data), "--epochs", "1", "--update", "sgd"]
    command += ["--batch-size", str(1000 // ranks)]
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks > 1 else []
    start = time.perf_counter()
    given = [*launcher, *command, "--model-out", str(model)]
    process = subprocess.Popen(given, preexec_fn=None if group is None else group.enter, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    most = 0
    while process.poll() is None:
        most = max(most, 0 if group is None else group.anonymous)
        time.sleep(0.2)
    output = process.communicate()[0].decode()
    if process.returncode != 0:
        raise click.ClickException(f"training on {ranks} ranks ended with status {process.returncode}: {output.strip()}")
    return time.perf_counter() - start, most


def forget(data: Path) -> None:
    """Drop a file from the page cache, in which it would count for whoever has read it."""
    with data.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@click.command(help=__doc__.splitlines()[0])
@click.option("--gigabytes", type=float, default=3.0, show_default=True, help="Size of the file.")
@click.option("--share", type=float, default=0.2, show_default=True, help="Memory of all ranks together, as a share of that.")
@click.option("--ranks", type=int, multiple=True, default=(1, 2), show_default=True)
@click.option("--values", type=click.Choice(list(KINDS)), default="drawn", show_default=True)
@click.option("--data", "given", type=click.Path(exists=True, path_type=Path), help="A binary file to train on; by default one is made.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to make the file; a temporary folder by default.")
def main(gigabytes: float, share: float, ranks: tuple[int, ...], values: str, given: Path | None, folder: Path | None) -> None:
    if os.geteuid() != 0:
        raise click.ClickException("control groups take root: run it by sudo")
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        data = given or made(place / "data.csr", gigabytes, values)
        size = data.stat().st_size
        print(f"file {size / 1e9:.2f} GB, limit {size * share / 1e9:.2f} GB for all ranks together; reads from disk are part of the time")
        print(f"{'ranks':>5} {'seconds, no limit':>18} {'with the limit':>15} {'most, with cache':>17} {'most, of no file':>17}  same bits")
        sys.stdout.flush()
        for number in ranks:
            free, _ = trained(data, place / "free.npz", number, None)
            with limited(int(size * share)) as group:
                tight, anonymous = trained(data, place / "tight.npz", number, group)
                peak = group.peak
            same = np.array_equal(load_model(place / "free.npz").weights, load_model(place / "tight.npz").weights)
            print(f"{number:5} {free:18.1f} {tight:15.1f} {peak / 1e9:14.2f} GB {anonymous / 1e9:14.2f} GB  {'yes' if same else 'NO'}")
            if not same:
                raise click.ClickException("the limit has changed the model")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
