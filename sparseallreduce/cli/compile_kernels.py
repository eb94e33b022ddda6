"""`doctor --compile`: everything that is compiled, done once in small, so that no later command has to wait for it."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import sparseallreduce as sar
from sparseallreduce.cli.train import train
from sparseallreduce.linear.data.convert import convert
from sparseallreduce.reducers import REDUCERS
from sparseallreduce.streams.kernels.compilations import Compilations
from sparseallreduce.streams.wire import INDEX_NAMES

__all__ = ["compile_kernels"]

_ROWS, _FEATURES = 60, 40


def compile_kernels() -> Compilations:
    """Compile the kernels of sums, readers and training for the types that they take by default; collective over ``COMM_WORLD``.

    What numba has in its cache is loaded. Kernels that only several ranks need are compiled where there are several.
    """
    with Compilations().counted() as done, tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _sums()
        _training(Path(folder))
    return done


def _sums() -> None:
    """Make every sum, exact and lossy, of few entries."""
    rng = np.random.default_rng(0)
    size, ranks = 4096, 4
    for dtype in ("float32", "float64"):
        dense = [np.where(rng.random(size) < 0.05, rng.standard_normal(size), 0).astype(dtype) for _ in range(ranks)]
        streams = [sar.SparseStream.from_dense(array) for array in dense]
        for name in sar.algorithms():
            sar.simulate(streams, name)
        for codec in INDEX_NAMES:
            options: Any = {"index_codec": codec}
            sar.simulate(streams, "ssar_split_allgather", **options)
        for reducer in REDUCERS.values():
            sar.simulate(dense, [reducer(size, size // 100) for _ in range(ranks)])


def _training(folder: Path) -> None:
    """Train by every solver and update, on every kind of text."""
    _write_samples(folder)
    two, three, table = folder / "two.svm", folder / "three.svm", folder / "table.csv"
    steps = ("--solver", "sgd", "--epochs", "2")
    for arguments in (
        (table, "--target", "y"),
        *((samples, *way) for samples in (two, three) for way in ((), ("--solver", "dual"), ("--solver", "newton"), (*steps,))),
        (two, "--model", "svm", "--solver", "dual"),
        (two, "--model", "svm", *steps, "--update", "arow"),
        *((two, *steps, "--update", "sgd", "--learning-rate", "0.1", *way) for way in _WAYS),
        (folder / "two.vw", *steps),
        (folder / "two.csr",),
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            train.main([*map(str, arguments), "--progress", "off"], standalone_mode=False)


_WAYS = (
    *(("--strategy", strategy) for strategy in ("sparse", "dense", "overlapped")),
    ("--l2", "0.01", "--l1", "0.01"),
    ("--momentum", "0.9"),
    ("--average", "1"),
)


def _write_samples(folder: Path) -> None:
    rng = np.random.default_rng(0)
    lines: dict[str, list[str]] = {"two.svm": [], "three.svm": [], "two.vw": [], "table.csv": ["n,t,y"]}
    for row in range(_ROWS):
        features = np.sort(rng.choice(_FEATURES, 8, replace=False)) + 1
        pairs = " ".join(f"{feature}:{value:.3f}" for feature, value in zip(features, rng.standard_normal(8)))
        lines["two.svm"].append(f"{row % 2} {pairs}")
        lines["three.svm"].append(f"{row % 3} {pairs}")
        lines["two.vw"].append(f"{1 - row % 2 * 2} | {pairs}")
        lines["table.csv"].append(f'{rng.standard_normal():.3f},"a, {row % 4}",{row % 2}')
    for name, written in lines.items():
        (folder / name).write_text("\n".join(written) + "\n")
    convert(folder / "two.svm", folder / "two.csr", sar.SERIAL)
