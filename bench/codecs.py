"""Bits an index and nanoseconds of the codecs of the wire formats, beside the entropy and what else could be sent.

    python bench/codecs.py [--count 65536] [--repeats 30] [--json FILE]

Indices are 32 bits wide where the dimension allows. Each piece has --count of them. `plain` copies them, `varint` writes each gap in
bytes of seven bits (LEB128), and `elias-fano` is the size alone of that code in blocks of 1024. The ratio is of bits to those of
`plain` and, for uniform sets, to the entropy H(d)/d. Times are the least of all repeats, on warm caches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.contract import GAPS_BLOCK, QSGD_BLOCK

DENSITIES = (0.0001, 0.001, 0.01, 0.03, 0.0625, 0.125, 0.25, 0.5)
RUN = 16  # consecutive indices of a cluster, on average
WIDEST_BITMAP = 2**26


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=65_536, help="indices or values in a piece")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    rows = index_rows(options.count, options.repeats) + nonzero_rows(options.count, options.repeats)
    rows += value_rows(options.count, options.repeats)
    if options.json:
        options.json.write_text(json.dumps({"count": options.count, "repeats": options.repeats, "rows": rows}, indent=1))


def least(repeats: int, action: Callable[[], Any]) -> float:
    """The least processor nanoseconds of an action."""
    times = []
    for _ in range(repeats + 1):
        begin = time.thread_time_ns()
        action()
        times.append(time.thread_time_ns() - begin)
    return min(times[1:])


def index_rows(count: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    print("indices    density  codec        bits/index  / plain  / entropy   ns to encode   ns to decode")
    for kind, make in {"uniform": uniform, "zipf": zipf, "clustered": clustered}.items():
        for density in DENSITIES:
            indices = make(np.random.default_rng(0), density, count)
            entropy = (-density * np.log2(density) - (1 - density) * np.log2(1 - density)) / density if kind == "uniform" else None
            for name, (bits, encoding, decoding) in index_codecs(indices, repeats).items():
                row = {"kind": kind, "density": density, "codec": name, "bits": bits, "entropy": entropy}
                rows.append({**row, "encode_ns": encoding, "decode_ns": decoding})
                beside = f"{bits / entropy:9.3f}" if entropy else " " * 9
                times = "" if encoding is None else f"{encoding:13.2f}  {decoding:13.2f}"
                print(f"{kind:10} {100 * density:5g} %  {name:11} {bits:11.3f} {bits / 8 / indices.itemsize:8.3f} {beside}  {times}")
    return rows


def index_codecs(indices: np.ndarray, repeats: int) -> dict[str, tuple[float, float | None, float | None]]:
    """Bits an index, and nanoseconds an index to encode and decode, of each codec."""
    count, size = len(indices), int(indices[-1]) + 1
    back = np.empty_like(indices)
    found: dict[str, tuple[float, float | None, float | None]] = {}

    def measured(name: str, nbytes: int, encode: Callable[[], Any], decode: Callable[[], Any]) -> None:
        back[:] = 0
        encode()
        decode()
        assert (back == indices).all(), f"{name} does not give back what it was given"
        found[name] = 8 * nbytes / count, least(repeats, encode) / count, least(repeats, decode) / count

    copy = np.empty_like(indices)
    measured("plain", indices.nbytes, lambda: np.copyto(copy, indices), lambda: np.copyto(back, copy))
    if size <= WIDEST_BITMAP:
        bits = np.empty(-(-size // 8), np.uint8)
        encode = lambda: kernels.encode_bitmap(indices, 0, size, bits)  # noqa: E731
        measured("bitmap", len(bits), encode, lambda: kernels.decode_bitmap(bits, 0, size, back))
    room = np.empty(kernels.gaps_bound(count, indices.dtype), np.uint8)
    gaps = room[: kernels.encode_gaps(indices, 0, room)].copy()
    measured("gaps", len(gaps), lambda: kernels.encode_gaps(indices, 0, room), lambda: kernels.decode_gaps(gaps, 0, size, back))
    octets = np.empty(10 * count, np.uint8)
    nbytes = encode_varint(indices, octets)
    measured("varint", nbytes, lambda: encode_varint(indices, octets), lambda: decode_varint(octets, back))
    found["elias-fano"] = elias_fano_bits(indices) / count, None, None
    return found


def uniform(rng: np.random.Generator, density: float, count: int) -> np.ndarray:
    return placed(rng.geometric(density, count))


def clustered(rng: np.random.Generator, density: float, count: int) -> np.ndarray:
    """Runs of geometric lengths with a mean of RUN, and geometric distances between them."""
    begins = rng.random(count) < 1 / RUN
    distances = rng.geometric(min(1.0, density / (RUN * (1 - density))), count)
    return placed(np.where(begins, 1 + distances, 1))


def zipf(rng: np.random.Generator, density: float, count: int) -> np.ndarray:
    """Indices drawn with probability proportional to 1 / (i + 1), repeats left out, until they are ``count``."""
    size, drawn = count / density, count
    while True:
        indices = np.unique(np.expm1(rng.random(drawn) * np.log1p(size)).astype(np.int64))
        if len(indices) >= count:
            return placed(np.diff(np.sort(rng.choice(indices, count, replace=False)), prepend=-1))
        drawn *= 2


def placed(gaps: np.ndarray) -> np.ndarray:
    indices = np.cumsum(gaps) - 1
    return indices.astype(np.uint32 if indices[-1] < 2**32 else np.uint64)


def elias_fano_bits(indices: np.ndarray) -> int:
    """In blocks, each from the last index of the one before, with as many low bits as are best and a header as that of gaps."""
    total, before = 0, -1
    for start in range(0, len(indices), GAPS_BLOCK):
        block = indices[start : start + GAPS_BLOCK].astype(np.int64)
        n, extent = len(block), int(block[-1]) - before
        before = int(block[-1])
        low = max(0, (extent // n).bit_length() - 1)
        total += 8 * 6 + n * low + n + (extent >> low)
    return total


@numba.njit(nogil=True)
def encode_varint(indices, out):
    before, at = np.uint64(0), 0
    for i in range(len(indices)):
        gap = np.uint64(indices[i]) - before
        before = np.uint64(indices[i])
        while gap >= np.uint64(128):
            out[at] = (gap & np.uint64(127)) | np.uint64(128)
            gap >>= np.uint64(7)
            at += 1
        out[at] = gap
        at += 1
    return at


@numba.njit(nogil=True)
def decode_varint(octets, out):
    before, at = np.uint64(0), 0
    for i in range(len(out)):
        shift = np.uint64(0)
        while octets[at] & 128:
            before += (np.uint64(octets[at]) & np.uint64(127)) << shift
            shift += np.uint64(7)
            at += 1
        before += np.uint64(octets[at]) << shift
        at += 1
        out[i] = before


def nonzero_rows(count: int, repeats: int) -> list[dict[str, Any]]:
    print("dense arrays of float32  density   ns a non-zero to encode   to decode   / copy of the array: to encode   to decode")
    return [nonzero_row(density, count, repeats) for density in (0.03, 0.0625, 0.125, 0.25, 0.5)]


def nonzero_row(density: float, count: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    size = int(count / density)
    dense = np.where(rng.random(size) < density, rng.standard_normal(size), 0).astype(np.float32)
    values, back, bits = np.empty(size, np.float32), np.empty_like(dense), np.empty(-(-size // 8), np.uint8)
    n = kernels.encode_nonzero(dense, bits, values)
    encoding = least(repeats, lambda: kernels.encode_nonzero(dense, bits, values))
    decoding = least(repeats, lambda: kernels.decode_nonzero(bits, values[:n], back))
    assert (back == dense).all()
    copied = least(repeats, lambda: np.copyto(back, dense))
    times = f"{encoding / n:23.2f} {decoding / n:11.2f} {encoding / copied:31.2f} {decoding / copied:11.2f}"
    print(f"{'':24} {100 * density:5g} %  {times}")
    return {"kind": "dense", "density": density, "codec": "nonzero", "encode_ns": encoding / n, "decode_ns": decoding / n}


def value_rows(count: int, repeats: int) -> list[dict[str, Any]]:
    print("values     codec       bits/value   ns to encode  / copy   ns to decode  / copy   root mean square error")
    return [row for dtype in (np.float32, np.float64) for row in value_rows_of(dtype, count, repeats)]


def value_rows_of(dtype: type, count: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    values = np.random.default_rng(0).standard_normal(count).astype(dtype)
    back = np.empty_like(values)
    copied = least(repeats, lambda: np.copyto(back, values))
    for name, (bits, encode, decode) in value_codecs(values, back).items():
        encode()
        decode()
        error = float(np.sqrt(np.mean((back - values.astype(np.float64)) ** 2)))
        encoding, decoding = least(repeats, encode), least(repeats, decode)
        row = {"kind": values.dtype.name, "codec": name, "bits": bits, "error": error}
        rows.append({**row, "encode_ns": encoding / count, "decode_ns": decoding / count})
        times = f"{encoding / count:14.2f} {encoding / copied:7.1f} {decoding / count:14.2f} {decoding / copied:7.1f}"
        print(f"{values.dtype.name:10} {name:11} {bits:10.3f} {times}   {error:12.2e}")
    return rows


def value_codecs(values: np.ndarray, back: np.ndarray) -> dict[str, tuple[float, Callable[[], Any], Callable[[], Any]]]:
    found: dict[str, tuple[float, Callable[[], Any], Callable[[], Any]]] = {}
    for form in ("float16", "bfloat16"):
        halves = np.empty(len(values), np.uint16)
        found[form] = (
            16,
            lambda form=form, halves=halves: kernels.narrow(values, form, halves),
            lambda form=form, halves=halves: kernels.widen(halves, form, back),
        )
    for bits in (8, 4):
        scales, codes = np.empty(-(-len(values) // QSGD_BLOCK), np.float32), np.empty(-(-len(values) * bits // 8), np.uint8)
        found[f"qsgd{bits}"] = (
            bits + 32 / QSGD_BLOCK,
            lambda bits=bits, scales=scales, codes=codes: kernels.quantise(values, bits, 1, 0, scales, codes),
            lambda bits=bits, scales=scales, codes=codes: kernels.restore(scales, codes, bits, back),
        )
    return found


if __name__ == "__main__":
    main()
