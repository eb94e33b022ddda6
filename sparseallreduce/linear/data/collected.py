"""Collecting this rank's share of the samples of files in memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.blocks import Block, Column
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.formats import Samples
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["collected"]


def collected(samples: Samples, source: Source, comm: Any, dtype: DTypeLike = np.float32) -> Dataset:
    """Return this rank's samples as a data set, numbered over all ranks. Collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank, with what is wrong with a file, or if it has no samples.
    """
    mine = agreed(comm, lambda: _in_memory(samples.blocks, str(source), dtype))
    ranks = gather(comm, (mine.rows, mine.features))
    total = sum(rows for rows, _ in ranks)
    if total == 0:
        raise DatasetError(f"{source}: no samples in it")
    features = samples.encoding.features if samples.encoding else samples.features or max(features for _, features in ranks)
    weighted = any(gather(comm, mine.weights is not None))
    if weighted and mine.weights is None:
        mine = replace(mine, weights=np.ones(mine.rows))
    if samples.labels.named:
        mine = _numbered(mine, samples.labels.names, comm)
    first = sum(rows for rows, _ in ranks[: comm.rank])
    return replace(mine, features=features, first_sample=first, total_samples=total, encoding=samples.encoding)


def _numbered(mine: Dataset, found: list[str], comm: Any) -> Dataset:
    """Return the data set with labels renumbered from the names found by this rank to the sorted names of all ranks."""
    names = sorted(set().union(*gather(comm, found)))
    places = np.searchsorted(np.array(names), found).astype(np.float64)
    labelled = ~np.isnan(mine.labels)
    labels = np.full(mine.rows, np.nan)
    labels[labelled] = places[mine.labels[labelled].astype(np.int64)]
    return replace(mine, labels=labels, names=tuple(names))


def _in_memory(blocks: Generator[Block], source: str, dtype: DTypeLike) -> Dataset:
    """Return the samples of all blocks in memory; the number of features follows from the highest index."""
    labels, lengths, values, indices, weights = Column(np.float64), Column(np.int64), Column(dtype), None, Column(np.float64)
    highest = -1
    weighted = False
    with closing(blocks):
        for block in blocks:
            indices = indices or Column(block.indices.dtype)
            labels.append(block.labels)
            lengths.append(np.diff(block.indptr))
            values.append(block.values)
            indices.append(block.indices)
            weights.append(np.ones(len(block.labels)) if block.weights is None else block.weights)
            weighted |= block.weights is not None and not (block.weights == 1).all()
            highest = max(highest, int(block.indices.max(initial=0)) if len(block.indices) else -1)
    rows = lengths.array()
    indptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows, out=indptr[1:])
    found = indices.array() if indices else np.empty(0, np.uint32)
    counts = weights.array() if weighted else None
    return Dataset(indptr, found, values.array(), labels.array(), highest + 1, source=source, weights=counts)
