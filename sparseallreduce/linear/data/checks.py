"""Checks of a data set's arrays and labels, and of its consistency across ranks."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError, MismatchError
from sparseallreduce.linear.data.binary import kernels
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.kernels.compilation import compiled_entry
from sparseallreduce.streams.stream import index_dtype

if TYPE_CHECKING:
    from sparseallreduce.linear.data.dataset import Dataset
    from sparseallreduce.linear.models import LinearModel

__all__ = [
    "check_same",
    "check_labels",
    "check_parts",
    "check_rows",
    "checked_samples",
    "checksum",
    "described",
    "own_samples",
    "own_test_samples",
]

Array = NDArray[Any]

_LARGE = 1e18  # squares of smaller numbers are finite in float32


def check_rows(dataset: Dataset) -> None:
    """Raise an error if arrays do not have the form that :class:`~.dataset.Dataset` requires, or contain values that are not finite.

    Raises
    ------
    DatasetError
        With the first fault, and the number of its sample.
    """
    fault = _form_fault(dataset) or _number_fault(dataset)
    if fault is not None:
        raise DatasetError(f"{dataset.source}: {fault}")


def check_labels(dataset: Dataset, model: LinearModel) -> None:
    """Raise an error if labels do not suit the model.

    Raises
    ------
    DatasetError
        If the model has two classes, and a label is neither -1 nor +1; or if it has K classes, and a label is not one of 0 to K - 1; or if
        the loss is undefined or not finite for a label.
    """
    if not model.classifies:
        if dataset.names is not None:
            shown = ", ".join(map(repr, dataset.names[:2]))
            raise DatasetError(f"{dataset.source}: labels are names of classes, such as {shown}: use a classifier, not a regression")
        strange = np.flatnonzero(model.label_fault(dataset.labels))
        if len(strange):
            where = f"sample {dataset.first_sample + strange[0]} has the label {dataset.labels[strange[0]]:g}"
            raise DatasetError(f"{dataset.source}: {where}, for which the loss {model.loss_name} is undefined: choose another")
        _check_loss(dataset, model)
        return
    if model.columns is not None:
        strange = np.flatnonzero(~np.isin(dataset.labels, np.arange(model.columns)))
        if len(strange):
            where = f"sample {dataset.first_sample + strange[0]} has the label {dataset.labels[strange[0]]:g}"
            remedy = "numbered_classes(dataset, comm) converts any numbers"
            raise DatasetError(f"{dataset.source}: {where}, but those of {model.columns} classes are 0 to {model.columns - 1}: {remedy}")
        return
    strange = np.flatnonzero(np.abs(dataset.labels) != 1)
    if len(strange):
        where = f"sample {dataset.first_sample + strange[0]} has the label {dataset.labels[strange[0]]:g}"
        remedy = "two_classes(dataset, comm) converts any two numbers"
        raise DatasetError(f"{dataset.source}: {where}, but those of a classifier ({model.name}) are -1 and +1: {remedy}")


def _check_loss(dataset: Dataset, model: LinearModel) -> None:
    """Raise an error if labels are so large that their loss or its derivative overflows at a score of zero."""
    label, zero = np.array([largest_of(dataset.labels)], np.float64), np.zeros(1)
    if np.abs(label[0]) > _LARGE:
        with np.errstate(over="ignore"):
            loss, derivative = model.loss(zero, label), model.derivative(zero, label).astype(dataset.values.dtype)
        check_squares(dataset, "label", dataset.labels, float(np.abs(loss[0]) + np.abs(derivative[0])))


def largest_of(numbers: Array) -> Any:
    """Return the number of largest magnitude, or zero if there are none."""
    return numbers[int(np.abs(numbers).argmax())] if len(numbers) else numbers.dtype.type(0)


def check_squares(dataset: Dataset, what: str, numbers: Array, total: float) -> None:
    """Raise an error if ``total``, computed from values or labels, is not finite.

    Raises
    ------
    DatasetError
        With the largest number in its message.
    """
    if not np.isfinite(total):
        remedy = f"divide all {what}s by a number, so that their squares are finite"
        where = f"{dataset.source}: the {what} {largest_of(numbers):g}"
        raise DatasetError(f"{where} is too large to train on as {dataset.values.dtype}: {remedy}")


def checked_samples(dataset: Dataset, comm: Any, model: LinearModel, use: str, settings: Mapping[str, Any]) -> Dataset:
    """Return :func:`own_samples` after checking labels and settings for training a model. Collective over ``comm``.

    Raises
    ------
    DatasetError, MismatchError
        On all ranks, if there are no samples, or arrays, labels or settings do not match.
    """
    own = own_samples(dataset, comm, comm.size, use)
    agreed(comm, lambda: check_labels(own, model))
    check_same(comm, settings)
    check_parts(own, comm, comm.size)
    return own


def own_samples(dataset: Dataset, comm: Any, holders: int, use: str = "") -> Dataset:
    """Return this rank's samples of a data set, after checking its rows. Collective over ``comm``.

    If every rank has all samples, as with :meth:`~.dataset.Dataset.from_scipy`, each of the first ``holders`` ranks gets a block of the
    rows. Otherwise each rank keeps its own samples.

    Parameters
    ----------
    use : str
        Purpose of the data set, which has to be the same on all ranks.

    Raises
    ------
    DatasetError, MismatchError
        On all ranks, if a rank's rows are invalid, or features, dtypes or samples do not match.
    """
    agreed(comm, lambda: check_rows(dataset))
    if comm.size == 1:
        return _marked(dataset)
    whole = checksum(dataset) if dataset.first_sample == 0 and dataset.total_samples == dataset.rows > 0 else None
    facts = {"use": use, "number of features": dataset.features, "dtype of values": str(dataset.values.dtype)}
    check_same(comm, facts)
    ranks = gather(comm, (dataset.rows, whole))
    if any(bits is None for _, bits in ranks):
        return _marked(dataset)
    if len(set(ranks)) > 1:
        counts = ", ".join(str(rows) for rows, _ in ranks)
        differing = f"every rank claims to have all samples, but those of ranks 0 to {comm.size - 1} differ ({counts} rows)"
        raise MismatchError(f"{differing}: give all samples on every rank, or each rank's own by Dataset.of_ranks")
    low, high = (dataset.rows * min(rank, holders) // holders for rank in (comm.rank, comm.rank + 1))
    begin, end = dataset.indptr[low], dataset.indptr[high]
    own = replace(
        dataset,
        indptr=dataset.indptr[low : high + 1] - begin,
        indices=dataset.indices[begin:end],
        values=dataset.values[begin:end],
        labels=dataset.labels[low:high],
        weights=None if dataset.weights is None else dataset.weights[low:high],
        first_sample=low,
    )
    return _marked(own)


def _marked(dataset: Dataset) -> Dataset:
    """Return a data set whose non-zeros are not checked again, unless they are replaced."""
    return replace(dataset, checked=(dataset.indptr, dataset.indices, dataset.values, dataset.features))


def check_parts(dataset: Dataset, comm: Any, holders: int) -> None:
    """Raise an error on all ranks unless each sample is on exactly one of the first ``holders`` ranks.

    Raises
    ------
    DatasetError
        If there are no samples, or all have weight zero.
    MismatchError
        If the numbers of samples on the ranks do not match.
    """
    weight = float(dataset.rows if dataset.weights is None else dataset.weights.sum())
    ranks = gather(comm, (dataset.rows, dataset.first_sample, dataset.total_samples, weight))
    found = 0
    for rank, (rows, first, total, _) in enumerate(ranks):
        if total != ranks[0][2] or (rows and first != found):
            _refuse(f"rank {rank} holds {rows} of {total} samples from number {first} on, but earlier ranks hold {found} of {ranks[0][2]}")
        if rows and rank >= holders:
            _refuse(f"rank {rank} is a parameter server, but holds {rows} samples that no worker would train on")
        found += rows
    if found != ranks[0][2]:
        _refuse(f"all ranks together hold {found} samples of {ranks[0][2]}")
    if found == 0:
        raise DatasetError(f"{dataset.source}: there are no samples on any rank")
    if sum(weight for *_, weight in ranks) <= 0:
        raise DatasetError(f"{dataset.source}: no rank has a sample with a weight other than zero")


def own_test_samples(test: Dataset | None, training: Dataset, model: LinearModel, comm: Any, holders: int) -> Dataset | None:
    """Return this rank's samples of a test set, which the first ``holders`` ranks share, or None without a test set. Collective.

    Raises
    ------
    DatasetError, MismatchError
        On all ranks, as for :func:`own_samples` and :func:`check_parts`; or if it has more features than the training set, or labels that
        do not suit the model.
    """
    check_same(comm, {"test set": "given" if test is not None else "not given"})
    if test is None:
        return None
    own = own_samples(test, comm, holders, "test set")

    def check() -> None:
        if own.features > training.features:
            many = f"the test set has {own.features} features, but the training set {training.features}"
            raise DatasetError(f"{own.source}: {many}: read both with the same number")
        check_labels(own, model)

    agreed(comm, check)
    check_parts(own, comm, holders)
    return own


def check_same(comm: Any, facts: Mapping[str, Any]) -> None:
    """Raise an error on all ranks if facts differ between ranks.

    Raises
    ------
    MismatchError
        With the first fact that differs.
    """
    ranks = gather(comm, {name: described(fact) for name, fact in facts.items()})
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        for number, rank in enumerate(ranks):
            if rank.get(name) != ranks[0].get(name):
                what = f"the {name} is {ranks[0].get(name)} on rank 0 and {rank.get(name)} on rank {number}"
                raise MismatchError(f"all ranks must use the same settings, but {what}")


def checksum(dataset: Dataset) -> int:
    """Return a checksum of the samples."""
    bits = 0
    for array in (dataset.indptr, dataset.indices, dataset.values, dataset.labels, dataset.weights):
        bits = zlib.crc32(b"" if array is None else np.ascontiguousarray(array).data, bits)
    return bits


def described(fact: Any) -> str:
    """Return a text that describes a value, without memory addresses, which differ between ranks."""
    return re.sub(r" at 0x[0-9a-f]+", "", fact if isinstance(fact, str) else repr(fact))


@cache
def _compile(index: np.dtype[Any], value: np.dtype[Any]) -> None:
    """Compile the check of rows for these dtypes, or load it from the cache on disk. If several processes call it, one compiles."""
    arrays = (types.Array(kind, 1, "C", readonly=True) for kind in (types.int64, *map(numba.from_dtype, (index, value))))
    compiled_entry(kernels.first_fault, (*arrays, types.uint64))


def _refuse(reason: str) -> None:
    remedy = "create it by Dataset.of_ranks, or give all samples on every rank"
    raise MismatchError(f"the samples of the ranks do not form one data set: {reason}; {remedy}")


def _form_fault(dataset: Dataset) -> str | None:
    """Return what is wrong with shapes and dtypes of the arrays, or None."""
    indptr, indices, values, labels, weights = dataset.indptr, dataset.indices, dataset.values, dataset.labels, dataset.weights
    for name in ("indptr", "indices", "values", "labels", "weights"):
        array = getattr(dataset, name)
        if array is not None and np.ndim(array) != 1:
            return f"{name} has the shape {np.shape(array)}, not one dimension"
    rows = len(indptr) - 1
    if rows < 0 or indptr.dtype != np.int64:
        return f"indptr is {indptr.dtype} of length {len(indptr)}, not int64 of one more than there are samples"
    if len(labels) != rows:
        return f"there are {len(labels)} labels for {rows} samples"
    if weights is not None and len(weights) != rows:
        return f"there are weights of {len(weights)} samples, but {rows} samples"
    if dataset.features < 0 or indices.dtype != index_dtype(dataset.features):
        return f"indices are {indices.dtype}, not {index_dtype(max(0, dataset.features))} as for {dataset.features} features"
    if values.dtype not in (np.float32, np.float64) or len(values) != len(indices):
        return f"there are {len(values)} values of {values.dtype} for {len(indices)} indices, not as many of float32 or float64"
    if labels.dtype != np.float64 or (weights is not None and weights.dtype != np.float64):
        return f"labels are {labels.dtype}{'' if weights is None else f' and weights {weights.dtype}'}, not float64"
    if indptr[0] < 0 or indptr[-1] > len(indices) or (np.diff(indptr) < 0).any():
        return f"indptr does not increase from 0 to {len(indices)}, the number of non-zeros"
    return None


def _is_checked(dataset: Dataset) -> bool:
    """Return True if the non-zeros are those that have been checked; a data set that replaces some of them is checked again."""
    if dataset.checked is None:
        return False
    *arrays, features = dataset.checked
    now = dataset.indptr, dataset.indices, dataset.values
    same = all(one.__array_interface__ == other.__array_interface__ for one, other in zip(now, arrays, strict=True))
    return same and dataset.features == features


def _first_fault(dataset: Dataset) -> tuple[int, int, int]:
    _compile(dataset.indices.dtype, dataset.values.dtype)
    found: tuple[int, int, int] = kernels.first_fault(dataset.indptr, dataset.indices, dataset.values, np.uint64(dataset.features))
    return found


def _number_fault(dataset: Dataset) -> str | None:
    """Return what is wrong with the numbers in the arrays, or None."""
    fault, row, entry = (0, 0, 0) if _is_checked(dataset) else _first_fault(dataset)
    sample = dataset.first_sample + row
    if fault == kernels.ABOVE:
        return f"index {dataset.indices[entry]} of sample {sample} is not below the {dataset.features} features"
    if fault == kernels.UNSORTED:
        return f"index {dataset.indices[entry]} of sample {sample} does not follow a lower one: rows must be sorted, without duplicates"
    if fault == kernels.NOT_FINITE:
        return f"feature {dataset.indices[entry]} of sample {sample} is {dataset.values[entry]}, not a finite {dataset.values.dtype}"
    strange = np.flatnonzero(~np.isfinite(dataset.labels))
    if len(strange):
        return f"the label of sample {dataset.first_sample + strange[0]} is {dataset.labels[strange[0]]}"
    if dataset.weights is not None:
        strange = np.flatnonzero(~((dataset.weights >= 0) & (dataset.weights < math.inf)))
        if len(strange):
            return f"the weight of sample {dataset.first_sample + strange[0]} is {dataset.weights[strange[0]]}, not at least 0 and finite"
    return None
