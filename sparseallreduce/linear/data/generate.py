"""Synthetic classification data, as svmlight text or binary: uniform, or like the URL and Webspam sets of thesis table 5.1.

A sample is generated in three steps: draw features with repetition from the kind's distribution, drop repetitions, and give the features
values. Its label is the sign of a sparse linear model of these values plus noise. Samples are generated in chunks of bounded
size, each with its own seed, so that a file depends only on its arguments, and ranks can share the chunks of a binary file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.atomic_file import atomic_path
from sparseallreduce.linear.data.binary.writer import BinaryWriter
from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.files import PathLike, open_text, written
from sparseallreduce.linear.data.svmlight.kernels import NONZERO_CHARACTERS, format_svmlight
from sparseallreduce.runtime.objects import agreed, collective
from sparseallreduce.runtime.serial import SERIAL

__all__ = ["BINARY_SUFFIX", "KINDS", "Kind", "generate"]

Array = NDArray[Any]

BINARY_SUFFIX = ".csr"  # suffix of files in the binary format

_CHUNK = 2_000_000  # number of draws per chunk
_MICRO = 1_000_000  # values are written with six decimals, and stored as integer millionths
_DENSE_FEATURES = 64  # the most frequent features of the URL set are real numbers
_NOISE = 0.1  # standard deviation of the noise, relative to that of the true model's score


@dataclass(frozen=True)
class Kind:
    """The distribution of one kind of data set."""

    samples: int  # default number of samples
    features: int  # default number of features, N
    nonzeros: float  # mean number of non-zeros per sample
    spread: float  # the number of draws of a sample is within 1 -/+ spread of the mean, as a factor
    power_law: bool  # whether the feature of rank r is drawn in proportion to 1/r; otherwise all features are equally likely
    scattered: bool  # whether frequent features have scattered numbers; otherwise features are numbered by frequency
    values: str  # "ones", "mixed" (ones, except for the most frequent features) or "unit" (samples of length 1)
    positive: float  # fraction of samples of class +1
    informative: int  # number of most frequent features from which those of the true model are chosen


#: The kinds by name. Those like the sets of the thesis have their sizes and mean numbers of non-zeros.
KINDS = {
    "uniform": Kind(100_000, 100_000, 100.0, 0.0, False, False, "ones", 0.5, 100_000),
    "url-like": Kind(2_396_130, 3_231_961, 115.6, 0.5, True, False, "mixed", 0.33, 1_000),
    "webspam-like": Kind(350_000, 16_609_143, 3_728.0, 0.9, True, True, "unit", 0.61, 100_000),
}


class _Chunk(NamedTuple):
    """Consecutive generated samples, as compressed sparse rows."""

    positive: Array  # bool, one per sample
    indptr: Array  # int64, samples + 1
    indices: Array  # uint32
    micros: Array  # int32: values in millionths


@collective
def generate(
    kind: str,
    out: PathLike,
    *,
    samples: int | None = None,
    features: int | None = None,
    density: float | None = None,
    seed: int = 0,
    comm: Any = SERIAL,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a data set; the file appears under its name when it is complete. Collective over ``comm``.

    Parameters
    ----------
    kind : str
        A key of :data:`KINDS`.
    out : path
        Output file: in the binary format if it ends in ``.csr``, otherwise svmlight text, compressed for ``.gz``, ``.bz2`` or ``.xz``.
    samples, features : int, optional
        By default those of the kind.
    density : float, optional
        Non-zeros of a sample as a fraction of the features, by default from the kind's number of non-zeros.
    seed : int
        Seed; the same arguments give the same bytes.
    comm : communicator, optional
        Communicator of the ranks that share the work; text is written by rank 0 only.
    progress : callable, optional
        Function called with the number of samples that this rank has generated since the last call.

    Raises
    ------
    ValueError
        If a size is not positive or a density outside (0, 0.5].
    DatasetError
        On every rank, if the file cannot be written.
    """
    chosen = _chosen(KINDS[kind], samples, features, density)
    path = Path(out)
    if path.suffix == BINARY_SUFFIX:
        _write_binary(path, chosen, seed, comm, progress)
    else:
        agreed(comm, lambda: _write_text(path, chosen, seed, progress) if comm.rank == 0 else None)


def _chosen(kind: Kind, samples: int | None, features: int | None, density: float | None) -> Kind:
    samples = kind.samples if samples is None else samples
    features = kind.features if features is None else features
    if samples < 1 or features < 2:
        raise ValueError(f"there must be at least 1 sample and 2 features, not {samples} and {features}")
    if density is not None and not 0 < density <= 0.5:
        raise ValueError(f"density must be above 0 and at most 0.5, not {density:g}")
    nonzeros = min(kind.nonzeros, features / 4) if density is None else density * features
    return replace(kind, samples=samples, features=features, nonzeros=max(nonzeros, 1.0))


def _write_binary(path: Path, kind: Kind, seed: int, comm: Any, progress: Callable[[int], object] | None) -> None:
    def append() -> None:
        for chunk in _chunks(kind, seed, comm.rank, comm.size):
            values = (chunk.micros / _MICRO).astype(np.float32)
            writer.append(Block(chunk.indptr, chunk.indices, values, np.where(chunk.positive, 1.0, -1.0)))
            if progress is not None:
                progress(len(chunk.positive))

    with BinaryWriter(path, comm, features=kind.features) as writer:
        agreed(comm, append)
        writer.finish()


def _write_text(path: Path, kind: Kind, seed: int, progress: Callable[[int], object] | None) -> None:
    with written(path), atomic_path(path) as part, open_text(part, "wb") as file:
        for chunk in _chunks(kind, seed, 0, 1):
            text = np.empty(4 * len(chunk.positive) + NONZERO_CHARACTERS * len(chunk.indices), np.uint8)
            length = format_svmlight(chunk.positive, chunk.indptr[1:], chunk.indices, chunk.micros, text)
            file.write(text[:length].data)
            if progress is not None:
                progress(len(chunk.positive))


def _chunks(kind: Kind, seed: int, rank: int, ranks: int) -> Iterator[_Chunk]:
    """Yield a rank's share of the samples of a data set, chunk by chunk."""
    step = _step(kind.features) if kind.scattered else 1
    truth = _true_model(kind, step, np.random.default_rng((seed, 0)))
    draws = _draws(kind)
    rows = max(1, int(_CHUNK / (draws * (1 + kind.spread))))
    count = -(-kind.samples // rows)
    mine = range(count * rank // ranks, count * (rank + 1) // ranks)
    deviation = threshold = 0.0
    for number in dict.fromkeys((0, *mine)):  # the first chunk determines the distribution of scores
        rng = np.random.default_rng((seed, number + 1))
        # The last chunk is drawn in full too, so that a shorter file is a prefix of a longer one.
        indices, starts = _distinct_draws(kind, step, draws, rows, rng)
        micros = _values(kind, indices, starts, rng)
        scores = np.add.reduceat(truth[indices] * micros, starts)
        if number == 0:
            deviation = float(scores.std())
        scores += _NOISE * deviation * rng.standard_normal(rows)
        if number == 0:
            threshold = float(np.quantile(scores, 1 - kind.positive))
        if number in mine:
            kept = min(rows, kind.samples - number * rows)
            indptr = np.append(starts, len(indices))[: kept + 1]
            yield _Chunk(scores[:kept] > threshold, indptr, indices[: indptr[-1]], micros[: indptr[-1]])


def _step(features: int) -> int:
    """Return the distance, modulo N, of features of consecutive ranks; it is coprime to N, so that no two features collide."""
    step = round(features * 0.618)
    while math.gcd(step, features) != 1:
        step += 1
    return step


def _true_model(kind: Kind, step: int, rng: np.random.Generator) -> Array:
    """Return normally distributed weights for a quarter of the informative features, and zero for all others."""
    weights = np.zeros(kind.features, np.float32)
    informative = min(kind.informative, kind.features)
    chosen = rng.choice(informative, size=-(-informative // 4), replace=False)
    weights[chosen * step % kind.features] = rng.standard_normal(len(chosen), dtype=np.float32)
    return weights


def _draws(kind: Kind) -> float:
    """Return the mean number of draws per sample that gives the wanted number of distinct features, found by bisection."""
    # With very many features, those of high rank are combined in groups of about equal probability.
    edges = np.unique(np.concatenate([np.arange(10_000), np.geomspace(10_000, kind.features, 1_000).round()]))
    edges = np.append(edges[edges < kind.features], kind.features)
    members = np.diff(edges)
    share = (np.log1p(edges[1:]) - np.log1p(edges[:-1])) / math.log1p(kind.features) if kind.power_law else members / kind.features
    spread = 1 + kind.spread * np.linspace(-1, 1, 9)
    low, high = 0.0, 1e9
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        distinct = np.mean([(members * -np.expm1(draws * np.log1p(-share / members))).sum() for draws in middle * spread])
        low, high = (middle, high) if distinct < kind.nonzeros else (low, middle)
    return high


def _distinct_draws(kind: Kind, step: int, draws: float, rows: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return the features of some samples, ascending within each, and the position of each sample's first one."""
    counts = np.maximum(1, draws * rng.uniform(1 - kind.spread, 1 + kind.spread, rows) + rng.random(rows)).astype(np.int64)
    drawn = rng.random((rows, int(counts.max())))
    if kind.power_law:
        np.multiply(drawn, math.log1p(kind.features), out=drawn)
        np.expm1(drawn, out=drawn)
    else:
        drawn *= kind.features
    indices = np.minimum(drawn, kind.features - 1).astype(np.int64)
    if step != 1:
        indices = indices * step % kind.features
    indices = indices.astype(np.uint32)
    nobody = np.uint32(2**32 - 1)  # sorts after every feature
    indices[np.arange(indices.shape[1]) >= counts[:, None]] = nobody
    indices.sort(axis=1)
    kept = indices != nobody
    kept[:, 1:] &= indices[:, 1:] != indices[:, :-1]
    lengths = kept.sum(axis=1)
    return indices[kept], np.cumsum(lengths) - lengths


def _values(kind: Kind, indices: Array, starts: Array, rng: np.random.Generator) -> Array:
    """Return the value of every non-zero in millionths, from 1 to 1,000,000."""
    if kind.values == "unit":
        weights = rng.lognormal(0.0, 1.0, len(indices))
        norms = np.sqrt(np.add.reduceat(np.square(weights), starts))
        lengths = np.diff(np.append(starts, len(indices)))
        return np.asarray(np.maximum(1, (weights / np.repeat(norms, lengths) * _MICRO).round()), dtype=np.int32)
    micros = np.full(len(indices), _MICRO, np.int32)
    if kind.values == "mixed":
        real = np.flatnonzero(indices < _DENSE_FEATURES)
        micros[real] = rng.integers(1, _MICRO, len(real))
    return micros
