"""The time of a step with samples from a slow store, without a cache and with DataCache (CommLib figure 9).

Reading, decoding and computing count in time of the processor, to which the time of the store is added: what it gives, by its rate.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure as Picture

from sparseallreduce.cli.paper_figures.reading import RATE, SlowFiles
from sparseallreduce.data_cache import DataCache, StoredFiles
from sparseallreduce.torch import CachedDataset

from .data import Samples, digits
from .models import make
from .training import RATES, loss_of

if TYPE_CHECKING:
    from .figures import Sizes

__all__ = ["plot_reading", "reading"]

SIDE = 96  # pixels of an image, as CommLib's
BATCH = 16
SAMPLES = 480


class Decoded(torch.utils.data.Dataset):
    """Another data set, each of its samples decoded when it is asked for: what trains without a cache."""

    def __init__(self, files: StoredFiles) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return decoded(self.files[index])


def written(folder: Path, samples: int) -> list[Path]:
    """The digits as compressed images of SIDE x SIDE pixels with the noise of a camera, and their labels in the first byte."""
    rng, train = np.random.default_rng(0), digits().train
    paths = []
    for number in range(samples):
        image = np.kron(255 * train.x[number, 0].numpy(), np.ones((SIDE // 8, SIDE // 8)))
        noisy = np.clip(image + rng.normal(0, 8, image.shape), 0, 255).astype(np.uint8)
        paths.append(folder / f"{number}.image")
        paths[-1].write_bytes(bytes([int(train.y[number])]) + zlib.compress(noisy.tobytes()))
    return paths


def decoded(content: bytes) -> tuple[torch.Tensor, int]:
    """The image as the nets here take it, of 8 x 8 pixels, and its label."""
    pixels = np.frombuffer(zlib.decompress(content[1:]), np.uint8).reshape(8, SIDE // 8, 8, SIDE // 8)
    return torch.from_numpy(pixels.mean((1, 3), dtype=np.float32)[None] / 255), content[0]


def reading(sizes: Sizes) -> dict[str, Any]:
    """Epochs of the residual net on one core: reading, with decoding, and everything else, each the median of the steps."""
    torch.set_num_threads(1)
    net = make("resnet", 10)
    rate, momentum = RATES["resnet"]
    optimizer = torch.optim.SGD(net.parameters(), lr=rate / 10, momentum=momentum)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        store, local = Path(place, "store"), Path(place, "local")
        store.mkdir()
        paths = written(store, min(SAMPLES, sizes.most_samples or SAMPLES))
        nbytes, files = sum(path.stat().st_size for path in paths), SlowFiles(paths)
        for name, samples in data_sets(files, local):
            before = files.waited
            times = np.array(list(epoch(net, optimizer, samples, files)))
            io, others = (float(each) for each in np.median(times, 0))
            row = {"io": io, "others": others, "store": (files.waited - before) / len(times), "epoch": float(times.sum())}
            results[name] = row
            print(f"{name}: reading {1e3 * io:.2f} ms a step, others {1e3 * others:.2f} ms; {row['epoch']:.2f} s an epoch", flush=True)
    return {"epochs": results, "samples": len(paths), "bytes": nbytes, "rate": RATE}


def data_sets(files: StoredFiles, local: Path) -> Iterator[tuple[str, torch.utils.data.Dataset]]:
    """What each epoch reads from: the store, twice; a new cache, twice; and the cache of a later run, twice."""
    direct = Decoded(files)
    yield "naive, first epoch", direct
    yield "naive, second epoch", direct
    for run, first in (("DataCache", "first epoch (cold)"), ("DataCache, a later run", "first epoch (disk)")):
        with DataCache(local, memory_bytes=1 << 30) as cache:
            cached = CachedDataset(files, cache, name="digits", version=files.version, decode=decoded)
            yield f"{run}, {first}", cached
            yield f"{run}, second epoch (memory)", cached


def epoch(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: torch.utils.data.Dataset, files: SlowFiles
) -> Iterator[tuple[float, float]]:
    """Train for an epoch: seconds of reading a batch, and of everything else, of each step."""
    batches = iter(torch.utils.data.DataLoader(samples, BATCH, shuffle=True, drop_last=True))
    while True:
        start, waited = process_time(), files.waited
        batch = next(batches, None)
        if batch is None:
            return
        middle = process_time()
        optimizer.zero_grad()
        loss_of(net, Samples(*batch)).backward()
        optimizer.step()
        yield middle - start + files.waited - waited, process_time() - middle


def plot_reading(results: dict[str, Any], picture: Picture) -> None:
    axes = picture.subplots()
    epochs = results["epochs"]
    io, others = (1e3 * np.array([row[part] for row in epochs.values()]) for part in ("io", "others"))
    axes.bar(range(len(epochs)), others, color="tab:gray", label="others")
    axes.bar(range(len(epochs)), io, bottom=others, color="tab:blue", label="I/O")
    axes.set_xticks(range(len(epochs)), [name.replace(", ", ",\n") for name in epochs], fontsize="small")
    axes.set_ylabel("ms a step")
    axes.legend()
