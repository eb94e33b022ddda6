"""The only code that loops over elements: sorted indices and their values, merged, scattered, gathered and checked.

Compiled code takes its arguments for what it was compiled for, so that dtypes, dimensions and whether an output may be written are
checked here; what the arrays hold is checked there (see :mod:`~sparseallreduce.streams.kernels.compiled`).

Arrays are one-dimensional and C-contiguous, indices ``uint32`` or ``uint64`` and strictly increasing, values in the native byte
order and of shape ``(n,)`` or, row-sparse, ``(n, width)``. Inputs may be read-only and may start at any byte; outputs must not
overlap inputs. What NumPy's four arithmetic operators do to float32, float64, int32 and int64 is compiled by numba on first use and
cached on disk; for other operators and dtypes the same functions run on :mod:`~sparseallreduce.streams.kernels.reference`, in
plain NumPy, and give the bits that NumPy gives. Every compiled kernel releases the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.streams import memory
from sparseallreduce.streams.kernels import reference
from sparseallreduce.streams.kernels.contract import MALFORMED, PIECE, UINT32, UINT64, Indices, Positions, Values, unlike
from sparseallreduce.streams.operator import SUM, Operator

__all__ = [
    "PIECE",
    "cut_rows",
    "estimate_union",
    "first_violation",
    "gather_present",
    "inner_sums",
    "merge",
    "scatter",
    "scatter_set",
    "shared",
    "sum_cut_rows",
    "sum_duplicates",
    "sum_rows",
    "warm_up",
    "write_past",
]

_UINT8 = np.dtype(np.uint8)
_INT64 = np.dtype(np.int64)
_INDEX_DTYPES = (UINT32, UINT64)
_VALUE_DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64"))
_BITS: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: UINT32, 8: UINT64}
_LARGEST = 2**64 - 1
_entries: dict[tuple[Any, ...], Callable[..., Any]] = {}


def merge(ia: Indices, va: Values, ib: Indices, vb: Values, op: Operator, iout: Indices, vout: Values) -> int:
    """Write the union of two sorted index sets and their values.

    Parameters
    ----------
    ia, ib : ndarray of uint32 or uint64, shapes (m,) and (n,)
        Strictly increasing indices, both of one dtype.
    va, vb : ndarray, shapes (m,) and (n,), or (m, width) and (n, width)
        Their values, both of one dtype.
    op : Operator
        Where both hold an index, the output is ``op.ufunc(va, vb)``; else a bit-exact copy of the one value.
    iout, vout : ndarray
        The outputs, of the dtypes of the inputs and with room for at least ``m + n`` entries. What they hold beyond the
        returned length is undefined afterwards.

    Returns
    -------
    int
        The number of indices in the union.

    Raises
    ------
    StreamError
        If lengths, widths, dimensions or dtypes do not fit together, an array has gaps, or an output is read-only.

    Notes
    -----
    The time per output does not depend on the order of the indices or on how many are shared; it is that of a copy where the
    ranges are disjoint or one input is many times longer than the other.
    """
    if not (
        ia.ndim == ib.ndim == iout.ndim == 1
        and va.ndim == vb.ndim == vout.ndim
        and ia.dtype == ib.dtype == iout.dtype
        and va.dtype == vb.dtype == vout.dtype
        and iout.flags.writeable
        and vout.flags.writeable
    ):
        raise unlike("merged", ia=ia, va=va, ib=ib, vb=vb, iout=iout, vout=vout)
    entry = _entries.get(("merge", op.ufunc, ia.dtype, va.dtype, va.ndim)) or _compiled("merge", op.ufunc, ia.dtype, va.dtype, va.ndim)
    n: int = entry(ia, va, ib, vb, iout, vout) if entry is not None else _merge_by_parts(ia, va, ib, vb, op, iout, vout)
    if n == MALFORMED:
        raise StreamError(
            f"cannot merge {ia.shape} indices with {va.shape} values and {ib.shape} with {vb.shape} into {iout.shape} and {vout.shape}: "
            "each index needs a value, the outputs room for all, and every array must be C-contiguous"
        )
    return n


def scatter(indices: Indices, values: Values, lo: int, op: Operator, dense: Values) -> None:
    """Combine values into a dense array: ``dense[indices - lo] = op.ufunc(dense[indices - lo], values)``.

    Parameters
    ----------
    indices : ndarray of uint32 or uint64, shape (n,)
        Strictly increasing, each in ``[lo, lo + len(dense))``.
    values : ndarray, shape (n,) or (n, width)
    lo : int
        The index that ``dense[0]`` stands for.
    op : Operator
    dense : ndarray, shape (size,) or (size, width)
        Changed in place; of the dtype of ``values``.

    Raises
    ------
    StreamError
        If an index lies outside of ``dense``, after what lies inside has been combined; or, before anything has, if the first or the
        last does, lengths, widths, dimensions or dtypes do not fit together, an array has gaps, or ``dense`` is read-only.
    """
    if indices.ndim != 1 or dense.ndim != values.ndim or dense.dtype != values.dtype or not dense.flags.writeable:
        raise unlike("scattered", indices=indices, values=values, dense=dense)
    entry = _entries.get(("scatter", op.ufunc, indices.dtype, values.dtype, values.ndim)) or _compiled(
        "scatter", op.ufunc, indices.dtype, values.dtype, values.ndim
    )
    if entry is None:
        reference.scatter(indices, values, lo, op, dense)
    elif entry(indices, values, lo, dense) == MALFORMED:
        raise _scatter_error(indices, values, lo, dense)


def scatter_set(indices: Indices, values: Values, lo: int, dense: Values) -> None:
    """Assign values to places of a dense array: ``dense[indices - lo] = values``, bit by bit.

    Parameters and exceptions are those of :func:`scatter`.
    """
    if indices.ndim != 1 or dense.ndim != values.ndim or dense.dtype != values.dtype or not dense.flags.writeable:
        raise unlike("scattered", indices=indices, values=values, dense=dense)
    if values.dtype == np.float16:
        values, dense = values.view(np.uint16), dense.view(np.uint16)
    entry = _entries.get(("scatter", "replace", indices.dtype, values.dtype, values.ndim)) or _compiled(
        "scatter", "replace", indices.dtype, values.dtype, values.ndim
    )
    if entry is None:
        reference.scatter_set(indices, values, lo, dense)
    elif entry(indices, values, lo, dense) == MALFORMED:
        raise _scatter_error(indices, values, lo, dense)


def gather_present(dense: Values, lo: int, index_dtype: DTypeLike) -> tuple[Indices, Values]:
    """Find what is not zero in a dense array.

    Parameters
    ----------
    dense : ndarray, shape (size,) or (size, width)
    lo : int
        The index that ``dense[0]`` stands for.
    index_dtype : {uint32, uint64}
        Dtype of the indices; it must hold ``lo + size - 1``.

    Returns
    -------
    indices : ndarray, shape (n,)
        ``lo`` plus the positions of the elements that are not zero, or of the rows that have such an element. NaN is not zero,
        and -0.0 is.
    values : ndarray, shape (n,) or (n, width)
        A copy of what is there.

    Raises
    ------
    StreamError
        If ``dense`` is not C-contiguous.
    """
    index_dtype = np.dtype(index_dtype)
    entry = None
    if dense.dtype in _VALUE_DTYPES:
        bits_dtype = _BITS[dense.dtype.itemsize]
        entry = _compiled("gather_present", None, index_dtype, bits_dtype, dense.ndim)
    if entry is None:
        return reference.gather_present(dense, lo, index_dtype)
    width = dense.shape[1:]
    mask = 2 ** (8 * dense.dtype.itemsize - (dense.dtype.kind == "f")) - 1  # without the sign of a zero
    present = dense.view(bits_dtype)
    room = _expected_present(present, mask)
    while True:
        indices, values = np.empty(room, index_dtype), np.empty((room, *width), dense.dtype)
        found = entry(present, mask, lo, indices, values.view(bits_dtype))
        if found == MALFORMED:
            raise StreamError(f"the dense array of shape {dense.shape} and strides {dense.strides} is not C-contiguous")
        if found <= room:
            indices.resize(found, refcheck=False)
            values.resize((found, *width), refcheck=False)
            return indices, values
        room = found


def _expected_present(bits: Values, mask: int) -> int:
    """Room for what a dense array probably holds, by a sample, so that large ones need not be read twice."""
    blocks = len(bits) // 2048
    if bits.ndim != 1 or blocks < 32 or not bits.flags.c_contiguous:
        return 0
    sample = bits[: blocks * 2048].reshape(blocks, 2048)[:, :64] & bits.dtype.type(mask)
    return min(len(bits), 48 * int(np.count_nonzero(sample)) + 4096)  # half as much again, which is never touched


def first_violation(indices: Indices, size: int) -> int:
    """Find the first index that is not larger than its predecessor, or not below ``size``.

    Parameters
    ----------
    indices : ndarray of uint32 or uint64, shape (n,)
    size : int
        The dimension of the stream, of any magnitude.

    Returns
    -------
    int
        The position of that index; -1 if there is none.

    Raises
    ------
    StreamError
        If ``indices`` is no vector, or not C-contiguous.
    """
    if indices.ndim != 1:
        raise unlike("checked", indices=indices)
    entry = _entries.get(("first_violation", None, indices.dtype, UINT32, 1)) or _compiled(
        "first_violation", None, indices.dtype, UINT32, 1
    )
    if entry is None or size <= 0:
        return reference.first_violation(indices, size)
    position: int = entry(indices, min(size - 1, _LARGEST))
    if position == MALFORMED:
        raise StreamError(f"the indices of shape {indices.shape} and strides {indices.strides} are not C-contiguous")
    return position


def sum_duplicates(indices: Indices, values: Values, op: Operator = SUM) -> tuple[Indices, Values]:
    """Combine the values of equal indices, in order of appearance.

    Parameters
    ----------
    indices : ndarray of uint32 or uint64, shape (n,)
        Sorted; repeats stand next to each other.
    values : ndarray, shape (n,) or (n, width)
    op : Operator
        The values ``x, y, z`` of an index become ``op.ufunc(op.ufunc(x, y), z)``.

    Returns
    -------
    indices : ndarray, shape (m,)
        Strictly increasing.
    values : ndarray, shape (m,) or (m, width)

    Raises
    ------
    StreamError
        If there are not as many values as indices, an array has gaps, or the indices change meanwhile.
    """
    if indices.ndim != 1:
        raise unlike("added up", indices=indices, values=values)
    entry = _compiled("sum_duplicates", op.ufunc, indices.dtype, values.dtype, values.ndim)
    if entry is None:
        return reference.sum_duplicates(indices, values, op)
    width = values.shape[1:]
    different = entry(indices, values, np.empty(0, indices.dtype), np.empty((0, *width), values.dtype))
    if different == MALFORMED:
        raise StreamError(f"{indices.shape} indices need as many values, not {values.shape}, and both must be C-contiguous")
    iout, vout = np.empty(different, indices.dtype), np.empty((different, *width), values.dtype)
    if entry(indices, values, iout, vout) != different:
        raise StreamError("the indices have changed while the values of equal ones were added up: leave them alone meanwhile")
    return iout, vout


def sum_rows(
    rows: Indices,
    values: Values,
    start: int,
    counts: NDArray[np.int64],
    lo: int,
    hi: int,
    dense: Values,
    *,
    checked: bool = False,
) -> None:
    """Sum streams that lie one in a row of bytes: from byte ``start`` on their values, behind them aligned their indices.

    Parameters
    ----------
    rows, values : ndarray, shapes (ranks, bytes / index size) and (ranks, bytes / value size)
        The same bytes as indices and as values.
    start : int
        A multiple of both sizes.
    counts : ndarray of int64, shape (ranks,)
        Entries of each row, or -1 for all values of a dense vector without indices.
    lo, hi : int
    dense : ndarray, shape (size,)
        The sum is written to ``dense[lo:hi]``, added up in the order of the rows; the rest is left as it is.
    checked : bool
        Whether dtypes, dimensions and flags of the arrays are known to be right, as those that a caller has made itself are.

    Raises
    ------
    StreamError
        If a row is too short for what it is to hold, or ``dense`` for an index or the range; or arrays are of other dtypes or dimensions,
        or ``dense`` is read-only.
    """
    if not checked and not (_are_rows(rows, values, counts) and dense.ndim == 1 and dense.dtype == values.dtype and dense.flags.writeable):
        raise unlike("summed", rows=rows, values=values, counts=counts, dense=dense)
    key = ("sum_rows", SUM.ufunc, rows.dtype, values.dtype, 1)
    entry = _entries.get(key) or _compiled(*key)
    if (entry or reference.sum_rows)(rows, values, start, counts, lo, hi, np.empty(len(counts), np.uint64), dense) == MALFORMED:
        raise StreamError(f"rows of {values[:1].nbytes} bytes cannot hold {counts} entries, or a vector of {len(dense)} not the indices")


def cut_rows(rows: Indices, itemsize: int, counts: NDArray[np.int64], size: int, part: int, parts: int, bounds: Positions) -> int:
    """Find one of some parts of the index space which all have about as many entries of all streams together.

    Parameters
    ----------
    rows : ndarray, shape (ranks, bytes / index size)
        Streams one in a row of bytes, their values in front and their indices aligned behind them.
    itemsize : int
        Bytes of a value, or of a row of them.
    counts : ndarray of int64, shape (ranks,)
        Entries of each row.
    size : int
        Of the index space.
    part : int
        Below ``parts``.
    parts : int
        How many there are.
    bounds : ndarray of uint64, shape (4, ranks + 1)
        Filled in: where in each row the entries of the part begin and, in the second row, where they end; last in these rows, where
        the part begins and ends in the index space, and in the third, how many entries lie before it.

    Returns
    -------
    int
        How many entries these are.

    Raises
    ------
    StreamError
        If a row is too short for what it is to hold.
    """
    if not (_are_rows(rows, rows, counts) and _are_bounds(bounds)):
        raise unlike("cut", rows=rows, counts=counts, bounds=bounds)
    key = ("cut_rows", None, rows.dtype, UINT32, 1)
    entry = _entries.get(key) or _compiled(*key)
    found: int = (entry or reference.cut_rows)(rows, itemsize, counts, size, part, parts, bounds)
    if found == MALFORMED:
        raise StreamError(f"rows of {rows[:1].nbytes} bytes cannot hold {counts} entries, or {bounds.shape} bounds not all there are")
    return found


def estimate_union(rows: Indices, start: int, itemsize: int, counts: NDArray[np.int64], samples: int) -> int:
    """How many different indices streams that lie one in a row of bytes have, as some of their entries tell: the same wherever it is asked.

    Parameters
    ----------
    rows, start, counts
        As for :func:`sum_rows`, without dense vectors.
    itemsize : int
        Bytes of a value, or of a row of them.
    samples : int
        Entries that are looked for in all rows.

    Raises
    ------
    StreamError
        If a row is too short for what it is to hold.
    """
    if not _are_rows(rows, rows, counts):
        raise unlike("looked at", rows=rows, counts=counts)
    key = ("estimate_union", None, rows.dtype, UINT32, 1)
    entry = _entries.get(key) or _compiled(*key)
    found: int = (entry or reference.estimate_union)(rows, start, itemsize, counts, samples)
    if found == MALFORMED:
        raise StreamError(f"rows of {rows[:1].nbytes} bytes cannot hold {counts} entries")
    return found


def sum_cut_rows(
    rows: Indices,
    values: Values,
    start: int,
    counts: NDArray[np.int64],
    bounds: Positions,
    inner: tuple[Indices, Values],
    iout: Indices,
    vout: Values,
    *,
    whole: bool = False,
    at_end: bool = False,
    limit: int = _LARGEST,
    checked: bool = False,
) -> int:
    """Sum a part of streams that lie one in a row of bytes, as :func:`cut_rows` has found it, as a balanced tree.

    Parameters
    ----------
    rows, values, start, counts
        As for :func:`sum_rows`, without dense vectors.
    bounds : ndarray of uint64, shape (4, ranks) or wider
        Where in each row the entries begin and, in the second row, where they end; they hold nothing of use afterwards.
    inner : (indices, values)
        Memory that :func:`inner_sums` has made.
    iout, vout : ndarray, shape (1, room)
        The outputs, with room for all entries of the part. What they hold beside the sum is undefined afterwards.
    whole : bool
        Whether the part is all there is, whatever ``bounds`` says.
    at_end : bool
        Whether the sum is to lie at the end of the outputs, not at their beginning.
    limit : int, optional
        The most entries that the sum may have.
    checked : bool
        As for :func:`sum_rows`.

    Returns
    -------
    int
        How many entries the sum has; ``ABSENT``, which is -1, if more than ``limit``.

    Raises
    ------
    StreamError
        If the rows do not hold the entries, the outputs are too short, have gaps or are read-only, or dtypes or dimensions are others.
    """
    if not checked and not (
        _are_rows(rows, values, counts)
        and _are_bounds(bounds)
        and inner[0].dtype == iout.dtype == rows.dtype
        and inner[1].dtype == vout.dtype == values.dtype
        and inner[0].ndim == inner[1].ndim == iout.ndim == vout.ndim == 2
        and _is_output(iout)
        and _is_output(vout)
    ):
        raise unlike("summed", rows=rows, values=values, counts=counts, bounds=bounds, iout=iout, vout=vout)
    key = ("sum_cut_rows", SUM.ufunc, rows.dtype, values.dtype, 1)
    entry = _entries.get(key) or _compiled(*key)
    found: int = (entry or reference.sum_cut_rows)(rows, values, start, counts, bounds, whole, at_end, limit, PIECE, *inner, iout, vout)
    if found == MALFORMED:
        raise StreamError(f"rows of {values[:1].nbytes} bytes do not hold these parts of {counts} entries, or more than {iout.shape[1]}")
    return found


def inner_sums(ranks: int, total: int, index_dtype: DTypeLike, value_dtype: DTypeLike) -> tuple[Indices, Values]:
    """Memory for the sums of two levels of the tree that :func:`sum_cut_rows` makes of so many entries of so many ranks at most."""
    shape = (2, min(total, PIECE) if ranks > 2 else 0)
    return memory.empty(shape, index_dtype), memory.empty(shape, value_dtype)


def write_past(target: NDArray[np.uint8], to: int, source: NDArray[np.uint8]) -> None:
    """Copy bytes past the caches, to memory that other processes read.

    Parameters
    ----------
    target, source : ndarray of uint8, shapes (m,) and (n,)
        Without gaps.
    to : int
        Where in ``target`` the copy is to begin.

    Raises
    ------
    StreamError
        If ``target`` is too short or read-only.
    """
    if not (target.ndim == source.ndim == 1 and target.dtype == source.dtype == _UINT8 and target.flags.writeable):
        raise unlike("copied", target=target, source=source)
    key = ("write_past", None, UINT32, UINT32, 1)
    entry = _entries.get(key) or _compiled(*key)
    if (entry or reference.write_past)(target, to, source) == MALFORMED:
        raise StreamError(f"{len(source)} bytes from {to} on do not fit into {len(target)}")


def shared(ia: Indices, ib: Indices) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Find the indices that two sorted sets share.

    Parameters
    ----------
    ia, ib : ndarray of uint32 or uint64, shapes (m,) and (n,)
        Strictly increasing, both of one dtype, C-contiguous.

    Returns
    -------
    in_a, in_b : ndarray of uint64, shape (s,)
        Where they lie: ``ia[in_a]`` and ``ib[in_b]`` are the same, in increasing order.

    Raises
    ------
    StreamError
        If dtypes or dimensions are others, or an array has gaps.
    """
    if not (ia.ndim == ib.ndim == 1 and ia.dtype == ib.dtype):
        raise unlike("compared", ia=ia, ib=ib)
    entry = _compiled("shared_positions", None, ia.dtype, UINT32, 1)
    if entry is None:
        return reference.shared(ia, ib)
    in_a, in_b = np.empty((2, min(len(ia), len(ib)) + 1), np.uint64)
    count = entry(ia, ib, in_a, in_b)
    if count == MALFORMED:
        raise StreamError(f"indices of strides {ia.strides} and {ib.strides} cannot be compared: both must be C-contiguous")
    return in_a[:count], in_b[:count]


def warm_up(index_dtype: DTypeLike = np.uint32, value_dtype: DTypeLike = np.float32, ndim: int = 1, op: Operator = SUM) -> None:
    """Compile, or load from disk, the kernels for one kind of stream, so that no later call has to.

    Of several processes that start at once on a machine, one compiles and the others wait for it. Without this, each kernel is
    compiled at its first call, in half a second.
    """
    indices = np.zeros(1, index_dtype)
    dense = np.ones((1, 1) if ndim == 2 else 1, value_dtype)
    merge(indices, dense, indices, dense, op, np.empty(2, index_dtype), np.repeat(dense, 2, axis=0))
    scatter(indices, dense, 0, op, dense.copy())
    scatter_set(indices, dense, 0, dense.copy())
    gather_present(dense, 0, index_dtype)
    first_violation(indices, 1)
    sum_duplicates(indices, dense, op)
    if op.is_sum and ndim == 1:
        rows = np.zeros((2, 2), np.uint64)
        packed, none = (rows.view(index_dtype), rows.view(value_dtype)), np.zeros(2, np.int64)
        bounds = np.zeros((4, 3), np.uint64)
        sum_rows(*packed, 0, none, 0, 1, dense)
        cut_rows(packed[0], dense.itemsize, none, 1, 0, 2, bounds)
        estimate_union(packed[0], 0, dense.itemsize, none, 1)
        write_past(rows[0].view(np.uint8), 0, rows[1].view(np.uint8))
        sum_cut_rows(*packed, 0, none, bounds, inner_sums(2, 0, index_dtype, value_dtype), *(array[:1] for array in packed))


def _merge_by_parts(ia: Indices, va: Values, ib: Indices, vb: Values, op: Operator, iout: Indices, vout: Values) -> int:
    """Merge in compiled code, leave room where indices meet, and fill it with what the operator makes of whole arrays."""
    copied = (va, vb, vout)
    if va.dtype == np.float16:  # which numba does not know on processors
        copied = (va.view(np.uint16), vb.view(np.uint16), vout.view(np.uint16))
    copy = _compiled("merge", "replace", ia.dtype, copied[0].dtype, va.ndim)
    if copy is None:
        return reference.merge(ia, va, ib, vb, op, iout, vout)
    n: int = copy(ia, copied[0], ib, copied[1], iout, copied[2])
    if n == MALFORMED:
        return n
    if n == len(ia) + len(ib):
        return n
    in_a, in_b = shared(ia, ib)
    vout[in_a + in_b - np.arange(len(in_a), dtype=np.uint64)] = reference.combine(op, va[in_a], vb[in_b])
    return n


def _compiled(name: str, operator: Any, index_dtype: np.dtype[Any], value_dtype: np.dtype[Any], ndim: int) -> Callable[..., Any] | None:
    """The compiled kernel for an operator (its ufunc, ``"replace"`` or None) and dtypes; None where there is none."""
    key = (name, operator, index_dtype, value_dtype, ndim)
    if key in _entries:
        return _entries[key]
    from numba.core import config  # only here: to import it takes half a second, which a user who never reduces a stream should not pay

    if config.DISABLE_JIT or index_dtype not in _INDEX_DTYPES or ndim not in (1, 2):  # type: ignore[attr-defined]
        return None
    from sparseallreduce.streams.kernels import compiled

    if operator is None:
        code = None
    elif operator in compiled.OPERATORS and value_dtype in (compiled.COPIED_DTYPES if operator == "replace" else compiled.VALUE_DTYPES):
        code = compiled.OPERATORS[operator]
    else:
        return None
    return _entries.setdefault(key, compiled.compile_kernel(name, index_dtype, value_dtype, ndim, code))


def _are_rows(rows: Indices, values: Values, counts: NDArray[np.int64]) -> bool:
    return rows.ndim == values.ndim == 2 and counts.ndim == 1 and counts.dtype == _INT64 and counts.flags.c_contiguous


def _are_bounds(bounds: Positions) -> bool:
    return bounds.ndim == 2 and bounds.dtype == UINT64 and bounds.flags.writeable


def _is_output(array: NDArray[Any]) -> bool:
    flags = array.flags
    return flags.c_contiguous and flags.writeable


def _scatter_error(indices: Indices, values: Values, lo: int, dense: Values) -> StreamError:
    bounds = f" {indices.min()}..{indices.max()}" if len(indices) else ""
    return StreamError(
        f"cannot scatter {indices.shape} indices{bounds} with {values.shape} values into a dense array of shape {dense.shape} that "
        f"begins at {lo}: each index needs a value and a place there, and every array must be C-contiguous"
    )
