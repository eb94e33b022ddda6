"""Time each kernel, as a ratio to the nearest NumPy function in the same run.

python bench/bench_kernels.py [--repeats 15] [--count 500000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numba
import numpy as np

from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels import reference
from sparseallreduce.streams.operator import SUM


@numba.njit(nogil=True)
def branchy_merge(ia, va, ib, vb, iout, vout):
    """The textbook's merge, with a branch on each comparison."""
    i = j = n = 0
    while i < len(ia) and j < len(ib):
        if ia[i] < ib[j]:
            iout[n], vout[n] = ia[i], va[i]
            i += 1
        elif ib[j] < ia[i]:
            iout[n], vout[n] = ib[j], vb[j]
            j += 1
        else:
            iout[n], vout[n] = ia[i], va[i] + vb[j]
            i += 1
            j += 1
        n += 1
    while i < len(ia):
        iout[n], vout[n] = ia[i], va[i]
        i, n = i + 1, n + 1
    while j < len(ib):
        iout[n], vout[n] = ib[j], vb[j]
        j, n = j + 1, n + 1
    return n


def medians(repeats: int, *actions: Callable[[], object]) -> list[float]:
    """Median processor seconds of each action on warm caches; they take turns, so that all meet the same noise."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats):
        for taken, action in zip(times, actions):
            action()
            begin = time.thread_time()
            action()
            taken.append(time.thread_time() - begin)
    return [statistics.median(taken) for taken in times]


def copy(*pairs: tuple[np.ndarray, np.ndarray]) -> None:
    """Copy the second array of each pair to the first."""
    for target, source in pairs:
        np.copyto(target, source)


def distinct(rng: np.random.Generator, count: int, low: int, high: int, dtype: type) -> np.ndarray:
    """About ``count`` sorted indices, uniformly random."""
    return np.unique(rng.integers(low, high, count, dtype=np.uint64)).astype(dtype)


def bench_merge(rng: np.random.Generator, count: int, repeats: int) -> None:
    """Merge two streams of several shapes and dtypes."""
    size = 2**24
    cases = {
        "random": (count, (0, size), count, (0, size)),
        "half shared": (count, (0, int(1.44 * count)), count, (0, int(1.44 * count))),
        "disjoint": (count, (0, size // 2), count, (size // 2, size)),
        "1 : 10": (count, (0, size), count // 10, (0, size)),
        "1 : 100": (count // 100, (0, size), count, (0, size)),
    }
    print("merge                              ns/output   / copy of the outputs   / branchy merge   / NumPy twin")
    for index_dtype, value_dtype in ((np.uint32, np.float32), (np.uint32, np.float64), (np.uint64, np.float32), (np.uint32, np.float16)):
        for name, (count_a, range_a, count_b, range_b) in cases.items():
            ia, ib = distinct(rng, count_a, *range_a, index_dtype), distinct(rng, count_b, *range_b, index_dtype)
            va, vb = (rng.standard_normal(len(i)).astype(value_dtype) for i in (ia, ib))
            iout, vout = np.zeros(len(ia) + len(ib), index_dtype), np.zeros(len(ia) + len(ib), value_dtype)
            n = kernels.merge(ia, va, ib, vb, SUM, iout, vout)
            icopy, vcopy = iout[:n].copy(), vout[:n].copy()

            to_merge = (ia, va, ib, vb)
            if value_dtype == np.float16:  # numba does not add them: there the copies alone
                to_merge_plainly = (ia, va.view(np.int16), ib, vb.view(np.int16), iout, vout.view(np.int16))
            else:
                to_merge_plainly = (*to_merge, iout, vout)
            ours, copied, plain, twin = medians(
                repeats,
                partial(kernels.merge, *to_merge, SUM, iout, vout),
                partial(copy, (icopy, iout[:n]), (vcopy, vout[:n])),
                partial(branchy_merge, *to_merge_plainly),
                partial(reference.merge, *to_merge, SUM, iout, vout),
            )
            label = f"{np.dtype(index_dtype).name} {np.dtype(value_dtype).name} {name}"
            print(f"  {label:32} {ours / n * 1e9:9.2f}   {ours / copied:21.2f}   {ours / plain:15.2f}   {ours / twin:12.3f}")
    ia, va = np.arange(1, dtype=np.uint32), np.ones(1, np.float32)
    iout, vout = np.empty(2, np.uint32), np.empty(2, np.float32)
    ours, plain = medians(1000, partial(kernels.merge, ia, va, ia, va, SUM, iout, vout), partial(np.add, va, va, out=vout[:1]))
    print(f"  one index and one index: {ours * 1e9:.0f} ns a call, {ours / plain:.2f} of one np.add")


def bench_rows(rng: np.random.Generator, count: int, repeats: int) -> None:
    """Merge two row-sparse streams."""
    print("merge of rows (width 64)           ns/row      / copy of the outputs   / NumPy twin")
    rows = count // 16
    for name, high in (("random", 2**24), ("half shared", int(1.44 * rows))):
        ia, ib = distinct(rng, rows, 0, high, np.uint32), distinct(rng, rows, 0, high, np.uint32)
        va, vb = (rng.standard_normal((len(i), 64)).astype(np.float32) for i in (ia, ib))
        iout, vout = np.zeros(len(ia) + len(ib), np.uint32), np.zeros((len(ia) + len(ib), 64), np.float32)
        n = kernels.merge(ia, va, ib, vb, SUM, iout, vout)
        vcopy = vout[:n].copy()
        ours, copied, twin = medians(
            repeats,
            partial(kernels.merge, ia, va, ib, vb, SUM, iout, vout),
            partial(copy, (vcopy, vout[:n])),
            partial(reference.merge, ia, va, ib, vb, SUM, iout, vout),
        )
        print(f"  {name:32} {ours / n * 1e9:9.2f}   {ours / copied:21.2f}   {ours / twin:12.3f}")


def bench_dense(rng: np.random.Generator, repeats: int) -> None:
    """Scatter into and gather from a dense array of several densities."""
    size = 2**24
    dense, other, total = np.zeros(size, np.float32), np.ones(size, np.float32), np.zeros(size, np.float32)
    print("dense arrays of 2**24 float32      ns/non-zero   / np.add of two dense arrays   / NumPy twin")
    for density in (0.001, 0.01, 0.1, 0.5):
        indices = np.flatnonzero(rng.random(size) < density).astype(np.uint32)
        values = rng.standard_normal(len(indices)).astype(np.float32)
        for name in ("scatter", "scatter_set", "gather_present"):
            dense[:] = 0
            dense[indices] = values
            arguments = {
                "scatter": (indices, values, 0, SUM, dense),
                "scatter_set": (indices, values, 0, dense),
                "gather_present": (dense, 0, np.uint32),
            }[name]
            ours, added, twin = medians(
                repeats,
                partial(getattr(kernels, name), *arguments),
                partial(np.add, other, other, out=total),
                partial(getattr(reference, name), *arguments),
            )
            label = f"{name} {100 * density:g} %"
            print(f"  {label:32} {ours / len(indices) * 1e9:11.2f}   {ours / added:28.2f}   {ours / twin:12.3f}")


def bench_indices(rng: np.random.Generator, count: int, repeats: int) -> None:
    """Check indices, and combine duplicates."""
    indices = distinct(rng, count, 0, 2**24, np.uint32)
    print("indices                            ns/index    / sum of the indices   / NumPy twin")
    ours, added, twin = medians(
        repeats,
        lambda: kernels.first_violation(indices, 2**24),
        lambda: np.sum(indices, dtype=np.uint32),
        lambda: reference.first_violation(indices, 2**24),
    )
    print(f"  {'first_violation':32} {ours / len(indices) * 1e9:9.2f}   {ours / added:20.2f}   {ours / twin:12.3f}")
    repeated = np.sort(rng.integers(0, count, count).astype(np.uint32))
    values = rng.standard_normal(count).astype(np.float32)
    ours, added, twin = medians(
        repeats,
        lambda: kernels.sum_duplicates(repeated, values),
        lambda: np.sum(repeated, dtype=np.uint32),
        lambda: reference.sum_duplicates(repeated, values),
    )
    print(f"  {'sum_duplicates':32} {ours / count * 1e9:9.2f}   {ours / added:20.2f}   {ours / twin:12.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--count", type=int, default=500_000, help="indices in a stream")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    begin = time.perf_counter()
    kernels.warm_up()
    print(f"compiling the kernels for uint32 and float32, or loading them from disk: {time.perf_counter() - begin:.2f} s")
    bench_merge(rng, options.count, options.repeats)
    bench_rows(rng, options.count, options.repeats)
    bench_dense(rng, options.repeats)
    bench_indices(rng, options.count, options.repeats)


if __name__ == "__main__":
    main()
