"""Decode altered bytes with the kernels of the wire formats, next to pages that no one may touch.

    python bench/fuzz_codecs.py --messages 100000 --seed 0

Each message is what a kernel wrote, in which some bytes were changed, cut off or put behind, or bytes at random. Inputs and outputs end
right before a page that cannot be read or written, or begin right behind one: who leaves an array ends the run. A decoder must refuse a
message or give what such a message can hold: indices that increase in their range, values that are finite. Its twin in NumPy must do the
same, to the bit. Messages left as they are must come back. `--only` repeats one message.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import mmap
import multiprocessing
import queue
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from tqdm import tqdm

from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels import reference
from sparseallreduce.streams.kernels.contract import GAPS_BLOCK, QSGD_BLOCK

SECONDS = 20.0  # for one message
NUMBERS = (0, 1, 2, 7, 8, 10, 31, 32, 33, 55, 56, 57, 63, 64, 65, 127, 128, 254, 255)  # of fields, where they are checked


class Arena:
    """Memory between two pages that cannot be touched."""

    def __init__(self, nbytes: int) -> None:
        page = mmap.PAGESIZE
        self.nbytes = -(-nbytes // page) * page
        self.memory = mmap.mmap(-1, self.nbytes + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None, use_errno=True)
        for at in (start, start + page + self.nbytes):
            if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "cannot protect a page")

    def place(self, shape: Any, dtype: Any, at_end: bool) -> np.ndarray:
        """An array at either end; the rest is filled with a pattern that ``untouched`` looks for."""
        self.inside = np.frombuffer(self.memory, np.uint8, self.nbytes, mmap.PAGESIZE)
        self.inside[:] = 0xA5
        length = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.used = slice(self.nbytes - length, self.nbytes) if at_end else slice(0, length)
        return self.inside[self.used].view(dtype).reshape(shape)

    def untouched(self) -> bool:
        return bool((self.inside[: self.used.start] == 0xA5).all() and (self.inside[self.used.stop :] == 0xA5).all())


class Wrong(Exception):
    """A decoder broke its promise."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one message to repeat")
    arguments = parser.parse_args()
    numbers = range(arguments.messages) if arguments.only is None else range(arguments.only, arguments.only + 1)
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    current, results = context.Value("q", -1), context.Queue()
    worker = context.Process(target=work, args=(arguments.seed, numbers, current, results))
    worker.start()
    outcome = None
    while outcome is None and (worker.is_alive() or not results.empty()):
        try:
            outcome = results.get(timeout=1.0)
        except queue.Empty:  # it is still at work, or has ended
            continue
    worker.join()
    counts, failures = outcome or (Counter(), {current.value: f"the process ended with {worker.exitcode}"})
    print(f"{len(numbers)} messages in {time.perf_counter() - start:.0f} s, seed {arguments.seed}")
    for (kind, result), count in sorted(counts.items()):
        print(f"{kind:18} {result:9} {count:7}")
    for number, failure in failures.items():
        print(f"message {number}: {failure}")
    print(f"{len(failures)} failures")
    sys.exit(bool(failures))


def work(seed: int, numbers: range, current: Any, results: Any) -> None:
    """What a process of its own does, so that the number of a message that ends it is known."""
    faulthandler.enable()
    results.put(run(seed, tqdm(numbers, unit="message", disable=None), current))


def run(seed: int, numbers: Any, current: Any = None) -> tuple[Counter[tuple[str, str]], dict[int, str]]:
    """How often which kind of message was accepted or refused, and what went wrong with which message."""
    arenas = Arena(1 << 17), Arena(1 << 17)
    counts: Counter[tuple[str, str]] = Counter()
    failures: dict[int, str] = {}
    for number in numbers:
        if current is not None:
            current.value = number
        rng = np.random.default_rng((seed, number))
        kind = str(rng.choice(list(KINDS)))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            accepted = KINDS[kind](rng, arenas)
        except Exception as error:
            failures[number] = f"{kind}: {type(error).__name__}: {error}"
        else:
            counts[kind, "accepted" if accepted else "refused"] += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
    return counts, failures


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


def demand(condition: Any, what: str) -> None:
    if not condition:
        raise Wrong(what)


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
    main()
