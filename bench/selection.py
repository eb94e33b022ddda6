"""Time each selector, in multiples of a copy of the array in the same run, and count how many values it chooses beside k.

python bench/selection.py [--size 16777216] [--density 0.01] [--dtype float32] [--repeats 15] [--json F]

A selector adds a gradient to a residual, chooses, and leaves zeros where it chose. The functions of the first lines only read. Each
round runs everything once, so that all have the same noise. A figure is the median over the rounds. `words` is the stated memory
traffic, in passes over the array: a copy makes two, `np.add` three.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparseallreduce.streams import selection
from sparseallreduce.streams.stream import SparseStream


@dataclass
class Row:
    """One line of the table."""

    name: str
    action: Callable[[], Any]
    passes: float
    seconds: list[float] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    shared: float = float("nan")  # of the exact top k, in the last round

    def run(self) -> Any:
        """Time it once."""
        begin = time.perf_counter()
        result = self.action()
        self.seconds.append(time.perf_counter() - begin)
        if isinstance(result, SparseStream):
            self.chosen.append(result.nnz)
        return result


def rows(array: np.ndarray, residual: np.ndarray, gradient: np.ndarray, k: int) -> list[Row]:
    """Everything that is measured; the first is the copy that all is compared with."""
    target = np.zeros_like(array)
    threshold = selection.kth_magnitude(array, k)
    selectors = {
        "Threshold": selection.Threshold(threshold),
        "ExactTopK": selection.ExactTopK(k),
        "ThresholdReuse, reusing": selection.ThresholdReuse(k, 10**9),
        "ThresholdReuse, exact": selection.ThresholdReuse(k, 1),
        "Gaussian": selection.Gaussian(k),
        "MSTopK, 30 searches": selection.MSTopK(k, 30),
        "DoubleSampling, 1 %": selection.DoubleSampling(k),
        "DoubleSampling, 0.1 %": selection.DoubleSampling(k, share=0.001),
        "ApproximateTopK, bucket 512": selection.ApproximateTopK(k),
        "ApproximateTopK, fixed": selection.ApproximateTopK(k, fixed=True),
        "ApproximateTopK, whole vector": selection.ApproximateTopK(k, bucket=None),
        "RandomK": selection.RandomK(k),
    }
    found = [
        Row("np.copyto", lambda: np.copyto(target, array), 2),
        Row("np.add in place", lambda: np.add(target, gradient, out=target), 3),
        Row("kth_magnitude", lambda: selection.kth_magnitude(array, k), 1),
        Row("select_at_least, read only", lambda: selection.select_at_least(array, threshold, expected=k), 1),
        Row("select_at_least, fused", lambda: selection.select_at_least(residual, threshold, gradient, expected=k), 3),
    ]
    for name, selector in selectors.items():
        found.append(Row(name, lambda selector=selector: selector(residual, gradient, clear=True), selector.passes))
    return found


def measure(size: int, density: float, dtype: str, repeats: int) -> list[dict[str, Any]]:
    """The table, as one dictionary a row."""
    rng = np.random.default_rng(0)
    array, k = rng.standard_normal(size).astype(dtype), max(1, int(size * density))
    gradient = (1e-3 * rng.standard_normal(size)).astype(dtype)
    residual = array.copy()
    table = rows(array, residual, gradient, k)
    top = selection.ExactTopK(k)(array + gradient)
    for _ in range(repeats + 1):
        for row in table:
            np.copyto(residual, array)
            result = row.run()
            if isinstance(result, SparseStream):
                row.shared = len(np.intersect1d(result.indices, top.indices, assume_unique=True)) / k
    copied = statistics.median(table[0].seconds[1:])
    return [
        {
            "name": row.name,
            "seconds": statistics.median(row.seconds[1:]),  # the first round compiles
            "copies": statistics.median(row.seconds[1:]) / copied,
            "words": row.passes,
            "chosen": statistics.mean(row.chosen[1:]) / k if row.chosen else None,
            "shared": row.shared if row.chosen else None,
        }
        for row in table
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2**24)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the table")
    options = parser.parse_args()
    table = measure(options.size, options.density, options.dtype, options.repeats)
    print(f"N = {options.size}, {options.density:.2%}, {options.dtype}: one copy takes {1e3 * table[0]['seconds']:.2f} ms")
    print(f"{'':32}{'ms':>8}{'copies':>8}{'words/N':>9}{'chosen/k':>10}{'of top k':>10}")
    for row in table:
        share = "".join(f"{row[name]:10.3f}" if row[name] is not None else " " * 10 for name in ("chosen", "shared"))
        print(f"{row['name']:32}{1e3 * row['seconds']:8.2f}{row['copies']:8.2f}{row['words']:9.1f}{share}")
    if options.json:
        arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"schema": 1, "arguments": arguments, "results": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
