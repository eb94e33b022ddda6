"""Seconds of a pass over samples on a slow store: without a cache, cold, warm on the disk, and warm in memory, by 1, 2 and 4 ranks.

    python bench/data_cache.py --folder /a/local/disk

The store is emulated: whoever reads from it waits until so many bytes would have come, one after the other on the host. In a pass of
"shares" each rank reads its part of a new order; in one of "all" every rank reads every sample. "file" is the trainer's reading of a
binary file. Before passes on the disk, its pages are dropped from memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np

from sparseallreduce.data_cache import DataCache
from sparseallreduce.data_cache.files import PIECE
from sparseallreduce.linear import generate, load

COLUMNS = ("store", "cold", "disk", "memory")
NONZEROS = 116  # of a sample of the file, 4 bytes each


class Store:
    """Samples, or what something else reads, at some bytes a second for all processes of the host together."""

    def __init__(self, folder: Path, samples: int, nbytes: int, rate: float) -> None:
        self._line, self.samples, self._nbytes, self._rate = folder / "line", samples, nbytes, rate

    def slowed(self, content: Any) -> Any:
        with self._line.open("w") as line:
            fcntl.flock(line, fcntl.LOCK_EX)
            time.sleep(len(content) / self._rate)
        return content

    def __getitem__(self, index: int) -> np.ndarray:
        return self.slowed(np.random.default_rng(index).integers(0, 256, self._nbytes, np.uint8))


class SlowedCache(DataCache):
    """Of files that are on the store."""

    store: Store

    def get(self, key: str, fetch: Callable[[], Any], **options: Any) -> Any:
        return super().get(key, lambda: self.store.slowed(fetch()), **options)


def forget(folder: Path) -> None:
    """Drop what is on a disk from memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(comm: Any, action: Callable[[], object]) -> float:
    """Seconds from when all ranks begin until all have ended."""
    comm.Barrier()
    start = time.perf_counter()
    action()
    comm.Barrier()
    return time.perf_counter() - start


def by_rank(given: dict[str, Any]) -> None:
    """What each rank of a launch does; rank 0 prints the seconds of each repeat, by what is read and how."""
    from mpi4py import MPI

    comm, folder = MPI.COMM_WORLD, Path(given["folder"])
    store = Store(folder, given["samples"], given["nbytes"], given["rate"])
    found: dict[str, list[float]] = {}

    def note(what: str, action: Callable[[], object]) -> None:
        found.setdefault(what, []).append(measured(comm, action))

    def read(cache: DataCache | None, indices: Iterable[int]) -> None:
        for index in indices:
            if cache is None:
                store[index]
            else:
                cache.get(f"sample {index}", lambda index=index: store[index])

    def shares(epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng(epoch).permutation(store.samples).tolist()
        return order[comm.rank :: comm.size]

    def everything(epoch: int) -> list[int]:
        return np.random.default_rng([epoch, comm.rank]).permutation(store.samples).tolist()

    def read_file() -> None:
        """A rank's share of the file's bytes, once."""
        left = (folder / "samples.csr").stat().st_size // comm.size
        while left > 0:
            store.slowed(bytes(min(left, PIECE)))
            left -= PIECE

    load(folder / "samples.csr", comm=comm)  # compiles
    for repeat in range(given["repeats"]):
        for kind in ("shares", "all"):
            place = folder / f"{kind} {repeat}"
            wanted = shares if kind == "shares" else everything
            note(f"{kind} store", lambda wanted=wanted: read(None, wanted(0)))
            on_disk = DataCache(place)
            note(f"{kind} cold", lambda wanted=wanted, cache=on_disk: read(cache, wanted(0)))
            if comm.rank == 0:
                forget(place)
            note(f"{kind} disk", lambda wanted=wanted, cache=on_disk: read(cache, wanted(1)))
            with DataCache(place, memory_bytes=1 << 34) as cache:
                read(cache, wanted(2))
                note(f"{kind} memory", lambda wanted=wanted, cache=cache: read(cache, wanted(3)))
        place = folder / f"file {repeat}"
        note("file store", read_file)
        options: dict[str, dict[str, int]] = {"cold": {}, "disk": {}, "memory": {"memory_bytes": 1 << 34}}
        for how, bounds in options.items():
            if comm.rank == 0 and how == "disk":
                forget(place)
            with SlowedCache(place, **bounds) as cache:
                cache.store = store
                if how == "memory":
                    load(folder / "samples.csr", comm=comm, cache=cache)
                note(f"file {how}", lambda cache=cache: load(folder / "samples.csr", comm=comm, cache=cache))
    if comm.rank == 0:
        print(json.dumps(found))


@click.command(help=__doc__.splitlines()[0])
@click.option("--ranks", type=int, multiple=True, default=(1, 2, 4), show_default=True)
@click.option("--samples", type=int, default=160, show_default=True)
@click.option("--kilobytes", type=int, default=128, show_default=True, help="Of a sample.")
@click.option("--rate", type=float, default=10.0, show_default=True, help="Of the store, MB/s.")
@click.option("--repeats", type=int, default=5, show_default=True, help="Medians of so many.")
@click.option("--folder", type=click.Path(path_type=Path), help="On the disk to measure; a temporary folder by default.")
def main(ranks: tuple[int, ...], samples: int, kilobytes: int, rate: float, repeats: int, folder: Path | None) -> None:
    total = samples * kilobytes * 1000
    print(f"{samples} samples of {kilobytes} kB, {total / 1e6:.1f} MB in all, from a store of {rate:g} MB/s")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "samples.csr"
        generate("url-like", path, samples=total // (8 * NONZEROS), features=1_000_000)
        print(f"A file of {path.stat().st_size / 1e6:.1f} MB. Seconds of a pass, medians of {repeats}")
        print(f"| what | ranks | {' | '.join(COLUMNS)} | cold / store | memory / store |\n| --- | ---: |{' ---: |' * (len(COLUMNS) + 2)}")
        given = {"samples": samples, "nbytes": kilobytes * 1000, "rate": rate * 1e6, "repeats": repeats}
        for count in ranks:
            own = Path(place) / str(count)
            own.mkdir()
            (own / "samples.csr").symlink_to(path)
            launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(count)]
            command = [*launcher, sys.executable, __file__, "--as-rank", json.dumps(given | {"folder": str(own)})]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for what in ("shares", "all", "file"):
                medians = [statistics.median(found[f"{what} {how}"]) for how in COLUMNS]
                ratios = f"{medians[1] / medians[0]:.2f} | {medians[3] / medians[0]:.4f}"
                print(f"| {what} | {count} | {' | '.join(f'{each:.3f}' for each in medians)} | {ratios} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        by_rank(json.loads(sys.argv[2]))
    else:
        main()
