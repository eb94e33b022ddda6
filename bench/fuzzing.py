"""What programs that try altered bytes share: memory whose ends cannot be passed, and messages tried in a process of its own."""

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
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

SECONDS = 20.0  # for one message

Found = tuple[Counter[tuple[str, str]], dict[int, str]]  # how often what was accepted or refused, and what went wrong, by number


def main(description: str, run: Callable[[int, Any, Any], Found]) -> None:
    """What a program does: ``run`` takes a seed, the numbers of messages, and where it has to say which of them it is at."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one message to repeat")
    arguments = parser.parse_args()
    numbers = range(arguments.messages) if arguments.only is None else range(arguments.only, arguments.only + 1)
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    current, results = context.Value("q", -1), context.Queue()
    worker = context.Process(target=work, args=(run, arguments.seed, numbers, current, results))
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
        print(f"{kind:28} {result:9} {count:7}")
    for number, failure in failures.items():
        print(f"message {number}: {failure}")
    print(f"{len(failures)} failures")
    sys.exit(bool(failures))


def work(run: Callable[[int, Any, Any], Found], seed: int, numbers: range, current: Any, results: Any) -> None:
    """What a process of its own does, so that the number of a message that ends it is known."""
    faulthandler.enable()
    results.put(run(seed, tqdm(numbers, unit="message", disable=None), current))


def tried(attempt: Callable[[np.random.Generator], tuple[str, bool]], seed: int, numbers: Any, current: Any = None) -> Found:
    """Make attempts, each of which says what it tried and whether that was accepted, or raises if it should not have been."""
    counts: Counter[tuple[str, str]] = Counter()
    failures: dict[int, str] = {}
    for number in numbers:
        if current is not None:
            current.value = number
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            kind, accepted = attempt(np.random.default_rng((seed, number)))
        except Exception as error:
            failures[number] = f"{type(error).__name__}: {error}"
        else:
            counts[kind, "accepted" if accepted else "refused"] += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
    return counts, failures


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


def demand(condition: Any, what: str) -> None:
    if not condition:
        raise Wrong(what)
