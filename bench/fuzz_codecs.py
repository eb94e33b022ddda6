"""Decode altered bytes with the kernels of the wire formats, next to pages that no one may touch.

    python bench/fuzz_codecs.py --messages 100000 --seed 0

Each message is what a kernel wrote, in which some bytes were changed, cut off or put behind, or bytes at random. Inputs and outputs end
right before a page that cannot be read or written, or begin right behind one: who leaves an array ends the run. A decoder must refuse a
message or give what such a message can hold: indices that increase in their range, values that are finite. Its twin in NumPy must do the
same, to the bit. Messages left as they are must come back. `--only` repeats one message.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzzing import Arena, Found, Wrong, demand, main, tried

from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels import reference
from sparseallreduce.streams.kernels.contract import GAPS_BLOCK, QSGD_BLOCK

NUMBERS = (0, 1, 2, 7, 8, 10, 31, 32, 33, 55, 56, 57, 63, 64, 65, 127, 128, 254, 255)  # of fields, where they are checked


def run(seed: int, numbers: Any, current: Any = None) -> Found:
    """Messages of kinds that are drawn."""
    arenas = Arena(1 << 17), Arena(1 << 17)

    def attempt(rng: np.random.Generator) -> tuple[str, bool]:
        kind = str(rng.choice(list(KINDS)))
        try:
            return kind, KINDS[kind](rng, arenas)
        except Exception as error:
            raise Wrong(f"{kind}: {type(error).__name__}: {error}") from error

    return tried(attempt, seed, numbers, current)


def index_set(rng: np.random.Generator, densest: bool) -> tuple[np.ndarray, int, int]:
    """Indices in some range, and the range."""
    dtype = rng.choice([np.uint32, np.uint64])
    count = int(rng.choice([0, 1, 2, 30, 300, GAPS_BLOCK - 1, GAPS_BLOCK, GAPS_BLOCK + 1, 2500]))
    densities = [0.01, 0.1, 0.5] if densest else [1e-6, 1e-4, 0.01, 0.1, 0.5]
    gaps = rng.geometric(rng.choice(densities), count)
    if rng.random() < 0.3:
        gaps[rng.random(count) < 0.9] = 1
    if dtype == np.uint64 and count and not densest and rng.random() < 0.3:
        gaps[rng.integers(count)] = 2 ** int(rng.integers(32, 62))
    places = np.cumsum(gaps.astype(np.uint64)) - np.uint64(1)
    extent = int(places[-1]) + 1 + int(rng.integers(3)) if count else int(rng.integers(100))
    if dtype == np.uint32 and extent > 2**32 - 10:
        dtype = np.uint64
    largest = 2**32 if dtype == np.uint32 else 2**63
    lo = int(rng.choice([0, 1, 1000, largest - extent])) if extent + 1000 < largest else 0
    return (places + np.uint64(lo)).astype(dtype), lo, lo + extent


def altered(octets: np.ndarray, rng: np.random.Generator, keeps_length: bool) -> np.ndarray:
    """The bytes with some flipped, overwritten, removed or put in, or others."""
    out = octets.copy()
    if rng.random() < 0.05:
        return rng.integers(0, 256, len(out) if keeps_length else int(rng.integers(200)), np.uint8)
    for _ in range(rng.choice([0, 1, 2, 5], p=[0.1, 0.5, 0.3, 0.1])):
        what = rng.choice(["flip", "number"] if keeps_length else ["flip", "number", "number", "cut", "append", "insert", "remove"])
        at = int(rng.integers(len(out) + 1)) if rng.random() < 0.6 else int(rng.integers(min(len(out), 8) + 1))
        if what == "flip" and at < len(out):
            out[at] ^= np.uint8(1 << int(rng.integers(8)))
        elif what == "number" and at < len(out):
            out[at] = rng.choice(NUMBERS)
        elif what == "cut":
            out = out[:at]
        elif what == "append":
            out = np.append(out, rng.integers(0, 256, int(rng.integers(1, 10)), np.uint8))
        elif what == "insert":
            out = np.insert(out, at, np.uint8(rng.choice(NUMBERS)))
        elif what == "remove":
            out = np.delete(out, slice(at, at + int(rng.integers(1, 4))))
    return out


def held(arena: Arena, octets: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The message at an end of an arena."""
    place = arena.place(len(octets), np.uint8, bool(rng.integers(4)))
    place[:] = octets
    return place


def increasing(indices: np.ndarray, lo: int, hi: int) -> bool:
    return len(indices) == 0 or bool((indices[1:] > indices[:-1]).all() and indices[0] >= lo and indices[-1] < hi)


def try_gaps(rng: np.random.Generator, arenas: tuple[Arena, Arena]) -> bool:
    indices, lo, hi = index_set(rng, densest=False)
    room = arenas[1].place(kernels.gaps_bound(len(indices), indices.dtype), np.uint8, bool(rng.integers(4)))
    good = room[: kernels.encode_gaps(indices, lo, room)].copy()
    demand(arenas[1].untouched(), "the encoder left its output")
    count = len(indices) if rng.random() < 0.9 else int(rng.integers(3000))
    octets, out = altered(good, rng, False), arenas[1].place(count, indices.dtype, bool(rng.integers(4)))
    accepted = kernels.decode_gaps(held(arenas[0], octets, rng), lo, hi, out)
    demand(arenas[1].untouched(), "the decoder left its output")
    twin = np.empty(count, indices.dtype)
    demand(accepted == reference.decode_gaps(octets, lo, hi, twin), f"accepted: {accepted}, and not by its twin")
    if accepted:
        demand(increasing(out, lo, hi), "indices do not increase or leave the range")
        demand((out == twin).all(), "indices differ from those of the twin")
    if count == len(indices) and octets.tobytes() == good.tobytes():
        demand(accepted and (out == indices).all(), "what was written does not come back")
    return accepted


def try_bitmap(rng: np.random.Generator, arenas: tuple[Arena, Arena]) -> bool:
    indices, lo, hi = index_set(rng, densest=True)
    good = np.empty(-(-(hi - lo) // 8), np.uint8)
    if len(good) > arenas[0].nbytes:
        return False
    bits = held(arenas[0], good, rng)
    kernels.encode_bitmap(indices, lo, hi - lo, bits)
    demand(arenas[0].untouched(), "the encoder left its output")
    good[:] = bits
    octets = altered(good, rng, True)
    count = len(indices) if rng.random() < 0.5 else int(np.unpackbits(octets).sum())
    if count * indices.itemsize > arenas[1].nbytes:
        count = len(indices)
    out = arenas[1].place(count, indices.dtype, bool(rng.integers(4)))
    accepted = kernels.decode_bitmap(held(arenas[0], octets, rng), lo, hi - lo, out)
    demand(arenas[1].untouched(), "the decoder left its output")
    twin = np.empty(count, indices.dtype)
    demand(accepted == reference.decode_bitmap(octets, lo, hi - lo, twin), f"accepted: {accepted}, and not by its twin")
    if accepted:
        demand(increasing(out, lo, hi) and (out == twin).all(), "indices do not increase, leave the range or differ")
    return accepted


def try_nonzero(rng: np.random.Generator, arenas: tuple[Arena, Arena]) -> bool:
    dtype = rng.choice([np.uint16, np.uint32, np.uint64])
    shape = (int(rng.integers(500)), *([int(rng.choice([0, 1, 3, 16]))] if rng.random() < 0.5 else []))
    dense = (rng.random(shape) < rng.choice([0.01, 0.1, 0.5])).astype(dtype)
    good, values = np.empty(-(-shape[0] // 8), np.uint8), arenas[1].place(shape, dtype, bool(rng.integers(4)))
    count = kernels.encode_nonzero(dense, good, values)
    demand(arenas[1].untouched(), "the encoder left its output")
    octets = altered(good, rng, True)
    kept = min(count if rng.random() < 0.5 else int(np.unpackbits(octets).sum()), shape[0])
    kept_values, out = values[:kept].copy(), arenas[1].place(shape, dtype, bool(rng.integers(4)))
    accepted = kernels.decode_nonzero(held(arenas[0], octets, rng), kept_values, out)
    demand(arenas[1].untouched(), "the decoder left its output")
    twin = np.empty(shape, dtype)
    demand(accepted == reference.decode_nonzero(octets, kept_values, twin), f"accepted: {accepted}, and not by its twin")
    demand(not accepted or out.tobytes() == twin.tobytes(), "the array differs from that of the twin")
    return accepted


def try_qsgd(rng: np.random.Generator, arenas: tuple[Arena, Arena]) -> bool:
    dtype, bits = rng.choice([np.float32, np.float64]), int(rng.choice([8, 4]))
    count = int(rng.choice([0, 1, 2, QSGD_BLOCK - 1, QSGD_BLOCK, QSGD_BLOCK + 1, 1000]))
    with np.errstate(all="ignore"):
        values = (rng.standard_normal(count) * rng.choice([0, 1e-44, 1.0, 1e37])).astype(dtype)
    scales, codes = np.empty(-(-count // QSGD_BLOCK), np.float32), arenas[1].place(-(-count * bits // 8), np.uint8, bool(rng.integers(4)))
    key = int(rng.integers(2**64, dtype=np.uint64))
    demand(kernels.quantise(values, bits, key, 0, scales, codes) == -1, "finite values are refused")
    demand(arenas[1].untouched(), "the encoder left its output")
    octets = altered(codes, rng, True)
    raw = scales if rng.random() < 0.7 else altered(scales.view(np.uint8), rng, True).view(np.float32)
    out = arenas[1].place(count, dtype, bool(rng.integers(4)))
    accepted = kernels.restore(raw, held(arenas[0], octets, rng), bits, out)
    demand(arenas[1].untouched(), "the decoder left its output")
    twin = np.empty(count, dtype)
    demand(accepted == reference.restore(raw, octets, bits, twin), f"accepted: {accepted}, and not by its twin")
    demand(not accepted or (np.isfinite(out).all() and out.tobytes() == twin.tobytes()), "values are not finite, or differ")
    return accepted


def try_floats(rng: np.random.Generator, arenas: tuple[Arena, Arena]) -> bool:
    dtype, form, count = rng.choice([np.float32, np.float64]), str(rng.choice(["float16", "bfloat16"])), int(rng.integers(500))
    raw = rng.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    halves, twin = arenas[1].place(count, np.uint16, bool(rng.integers(4))), np.empty(count, np.uint16)
    position = kernels.narrow(held(arenas[0], raw.view(np.uint8), rng).view(dtype), form, halves)
    demand(arenas[1].untouched(), "the encoder left its output")
    demand(position == reference.narrow(raw, form, twin), "another value is refused than by the twin")
    demand(position >= 0 or halves.tobytes() == twin.tobytes(), "bits differ from those of the twin")
    octets = rng.integers(0, 256, 2 * count, np.uint8)
    out, other = arenas[1].place(count, dtype, bool(rng.integers(4))), np.empty(count, dtype)
    kernels.widen(held(arenas[0], octets, rng).view(np.uint16), form, out)
    demand(arenas[1].untouched(), "the decoder left its output")
    reference.widen(octets.view(np.uint16), form, other)
    demand(out.tobytes() == other.tobytes(), "values differ from those of the twin")
    return position < 0


KINDS = {"gaps": try_gaps, "bitmap": try_bitmap, "nonzero": try_nonzero, "qsgd": try_qsgd, "floats": try_floats}

if __name__ == "__main__":
    main(__doc__.splitlines()[0], run)
