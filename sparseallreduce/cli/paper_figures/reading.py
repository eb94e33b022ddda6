"""Training with samples from a slow store, without a cache and with DataCache: figure 9 of CommLib (section 5.4)."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.cli.paper_figures.settings import Figure, Settings, on_first
from sparseallreduce.cli.paper_figures.tasks import Perceptron
from sparseallreduce.cli.pictures.panels import Bars, Picture, Quantity
from sparseallreduce.data_cache import DataCache, StoredFiles

__all__ = ["FIGURES", "RATE", "SlowFiles"]

Array = NDArray[Any]
Read = Callable[[int], Array]

_SIDE = 96  # pixels, as in the paper
RATE = 10e6  # bytes per second from the store
_BATCH = 16


class SlowFiles(StoredFiles):
    """Files on a store of limited speed. ``waited`` is the time that a store of that speed would have taken so far, in seconds."""

    waited: float = 0.0

    def __getitem__(self, index: int) -> bytes:
        content = super().__getitem__(index)
        self.waited += len(content) / RATE
        return content


class _Images(Perceptron):
    """A perceptron on images of noise; what it learns does not matter here."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__(width, seed)
        self._shapes |= {"into": (_SIDE**2, width)}
        self.size = sum(int(np.prod(shape)) for shape in self._shapes.values())

    def gradient_of(self, parameters: Array, images: Array, classes: Array) -> Array:
        """Return the gradient of the mean loss of these images."""
        total = np.empty(self.size, np.float32)
        self._descend(self.parts(parameters), images, classes, self.parts(total))
        return total


def _reading(settings: Settings) -> Picture:
    """Draw CommLib's figure 9: seconds of reading and of all else in a step, in four epochs."""
    count, width = (2 * _BATCH, 8) if settings.small else (30 * _BATCH, 256)
    task = _Images(width, settings.seed)
    parameters, rows = task.start(settings.seed), []
    with tempfile.TemporaryDirectory() as folder:
        store, local = Path(folder, "store"), Path(folder, "local")
        store.mkdir()
        files = SlowFiles(list(_written(store, count, settings.seed)))
        for name, read in _readers(files, local):
            rows.append((name, *np.median(list(_epoch(task, parameters, files, read, settings.seed)), axis=0).tolist()))
    parts = {"other": [other for _, _, other in rows], "reading and decoding": [reading for _, reading, _ in rows]}
    panel = Bars("Less is better", Quantity("time", "s", False), [name for name, _, _ in rows], parts)
    caption = (
        f"Measured here on one core, medians: {count} compressed images of {_SIDE} x {_SIDE} pixels, {_BATCH} in a step; reading "
        f"includes the time of a store with {RATE / 1e6:g} MB/s. A perceptron instead of ResNet-50 on a V100."
    )
    return Picture("CommLib 9: a step without a cache and with DataCache", [panel], caption)


def _written(folder: Path, count: int, seed: int) -> Iterator[Path]:
    """Write compressed images of noise."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        pixels = np.clip(128 + 16 * rng.standard_normal((_SIDE, _SIDE)), 0, 255).astype(np.uint8)
        path = folder / f"{number}.image"
        path.write_bytes(zlib.compress(pixels.tobytes()))
        yield path


def _decoded(content: bytes) -> Array:
    return np.frombuffer(zlib.decompress(content), np.uint8)


def _readers(files: StoredFiles, local: Path) -> Iterator[tuple[str, Read]]:
    """Yield the name of each epoch, and the function that reads a sample in it."""
    yield "no cache", lambda index: _decoded(files[index])
    for run, first in (("DataCache", "first epoch"), ("later run", "first epoch")):
        with DataCache(local, memory_bytes=1 << 28) as cache:

            def read(index: int, cache: DataCache = cache) -> Array:
                image: Array = cache.get(str(index), lambda: files[index], version=files.version(index), decode=_decoded)
                return image

            yield f"{run}, {first}", read
            yield f"{run}, second epoch", read


def _epoch(task: _Images, parameters: Array, files: SlowFiles, read: Read, seed: int) -> Iterator[tuple[float, float]]:
    """Train for an epoch; yield the seconds of reading and of all else in each step."""
    order = np.random.default_rng(seed).permutation(len(files))
    for begin in range(0, len(order), _BATCH):
        start, waited = process_time(), files.waited
        images = np.array([read(int(index)) for index in order[begin : begin + _BATCH]], np.float32) / 255
        middle = process_time()
        parameters -= np.float32(1e-3) * task.gradient_of(parameters, images, order[begin : begin + _BATCH] % 10)
        yield middle - start + files.waited - waited, process_time() - middle


FIGURES = (
    Figure("commlib-9", "a step with samples from a slow store, with and without DataCache",
           lambda settings: on_first(settings, lambda: _reading(settings))),
)  # fmt: skip
