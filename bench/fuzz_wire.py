"""Read altered messages of any streams and codecs, next to pages that no one may touch.

    python bench/fuzz_wire.py --messages 100000 --seed 0

Each message is one or several streams in packets, or in whole, in which some bytes or fields of headers were changed, packets or their ends
are missing, repeated or exchanged, or come from another message. In half of them the checksums of headers are made to match again, so that
the damage gets past them. What arrives must be refused with a WireError, or be streams that are valid. Packets, and all arrays that are
filled from them, end right before a page that cannot be read or written, or begin right behind one: who leaves an array ends the run.
Messages left as they are must come back to the bit. `--only` repeats one message.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from fuzzing import Arena, Found, demand, main, tried

from sparseallreduce import SparseStream, WireError
from sparseallreduce.streams import memory
from sparseallreduce.streams.dtypes import DTYPES, is_float
from sparseallreduce.streams.operator import PROD, SUM
from sparseallreduce.streams.partition import slice_range
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.wire import HEADER_BYTES, INDEX_CODECS, VALUE_NAMES, Assembly, CodedStream, decode, encode, packets
from sparseallreduce.streams.wire.values import quantised

ROOM = 1 << 16  # bytes of an arena; longer arrays lie elsewhere
LAYOUT = struct.Struct("<4sBBBBBBB5xQQQQQQQI")
DAMAGES = ("nothing", "field", "fields", "header byte", "payload", "cut", "longer", "lost", "repeated", "exchanged", "mixed")
MOST = (2**32 - 1, 2**64 - 1)
NUMBERS = (0, 1, 2, 3, 255, 256, 511, 512, 513, 2**31, 2**32 - 1, 2**32, 2**40, 2**60, 2**61, 2**63 - 1, 2**63, 2**64 - 1)


def run(seed: int, numbers: Any, current: Any = None) -> Found:
    """Messages with damages that are drawn."""
    guarded = Guarded(12)
    return tried(lambda rng: altered(rng, guarded), seed, numbers, current)


class Guarded:
    """Arenas that the arrays of one message take in turn; those that do not fit, or come when all are taken, lie elsewhere."""

    def __init__(self, count: int) -> None:
        self._arenas = [Arena(ROOM) for _ in range(count)]
        self._taken = 0
        self._empty = memory.empty

    @contextmanager
    def watching(self, rng: np.random.Generator) -> Iterator[None]:
        """Let what is read lie in arenas, and see afterwards that nothing was written beside it."""
        self._taken, self._rng = 0, rng
        with mock.patch.object(memory, "empty", self.empty):
            yield
        demand(all(arena.untouched() for arena in self._arenas[: self._taken]), "something was written beside an array")

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """As ``memory.empty``."""
        nbytes = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
        if nbytes > ROOM or self._taken == len(self._arenas):
            return self._empty(shape, dtype)
        self._taken += 1
        return self._arenas[self._taken - 1].place(shape, dtype, bool(self._rng.integers(4)))

    def held(self, octets: np.ndarray) -> np.ndarray:
        """A packet, in the last arena that is free or elsewhere."""
        place = self.empty(len(octets), np.uint8)
        place[:] = octets
        return place


def altered(rng: np.random.Generator, guarded: Guarded) -> tuple[str, bool]:
    """What was done to a message, and whether it was accepted."""
    streams, whole = [stream(rng) for _ in range(rng.choice([1, 2, 3]))], rng.random() < 0.2
    sent = [encode(streams)] if whole else in_packets(rng, streams)
    damage, arriving = damaged(rng, sent)
    arriving = [resealed(packet) for packet in arriving] if rng.random() < 0.5 else arriving
    with guarded.watching(rng):
        try:
            back = decode(guarded.held(arriving[0])) if whole else assembled(guarded, arriving)
        except WireError:
            demand(damage != "nothing", "a message that was left as it is was refused")
            return damage, False
        for each in back:
            check(each)
    if damage == "nothing":
        demand(len(back) == len(streams), "streams are missing")
        for ours, theirs in zip(streams, back):
            demand(same(ours, theirs), "a stream does not come back as it was")
    return damage, True


def assembled(guarded: Guarded, arriving: list[np.ndarray]) -> list[SparseStream]:
    assembly = Assembly()
    for packet in arriving:
        assembly.take(guarded.held(packet))
        if assembly.growing is not None:
            indices, values = assembly.growing.prefix()
            demand(len(values) == assembly.growing.arrived, "a prefix has another length")
            demand(indices is None or increasing(indices), "the indices of a prefix do not increase")
    if not assembly.complete:
        raise WireError("the end is missing")
    return assembly.streams


def stream(rng: np.random.Generator) -> SparseStream:
    """A stream of any form."""
    dtype, width = DTYPES[rng.integers(len(DTYPES))], rng.choice([None, None, None, 1, 3])
    size, density = int(rng.choice([0, 1, 7, 300, 3000])), rng.choice([0.0, 0.01, 0.2, 0.9, 1.0])
    present = np.flatnonzero(rng.random(size) < density)
    shape = (len(present),) if width is None else (len(present), width)
    values = (rng.standard_normal(shape) * 5).astype(dtype)
    values[rng.random(shape) < 0.2] = -0.0 if is_float(dtype) else 0
    form = str(rng.choice(["sparse", "dense", "masked", "part", "64 bits"]))
    shift = 2**33 if form == "64 bits" else 0
    whole = SparseStream(present + shift, values, size + shift, switch_density=1.0)
    if form in ("dense", "masked"):
        reduction = Reduction(SUM if form == "dense" else PROD, 1.0)
        whole = Reduction.freeze(reduction.densify(reduction.enter(whole)))
    elif form == "part":
        whole = slice_range(whole, size // 5, size - size // 7)
    if values.dtype in (np.float32, np.float64) and form != "masked" and rng.random() < 0.5:
        return quantised(whole, str(rng.choice(VALUE_NAMES)), int(rng.integers(2**63)))
    return whole


def in_packets(rng: np.random.Generator, streams: list[SparseStream]) -> list[np.ndarray]:
    codecs = [INDEX_CODECS[int(rng.integers(len(INDEX_CODECS)))] for _ in streams]
    return [packet.copy() for packet in packets(streams, codecs, int(rng.choice([1, 1000, 4000, 1 << 14, 1 << 17])))]


def damaged(rng: np.random.Generator, sent: list[np.ndarray]) -> tuple[str, list[np.ndarray]]:
    """A message with a damage, which is named, or with none."""
    arriving, number = [packet.copy() for packet in sent], int(rng.integers(len(sent)))
    packet = arriving[number]
    damage = str(rng.choice(DAMAGES))
    if damage in ("field", "fields"):
        headers = headers_of(packet)
        for _ in range(1 if damage == "field" else int(rng.integers(2, 5))):
            change_field(rng, packet, HEADER_BYTES * int(rng.integers(headers)))
    elif damage == "header byte":
        packet[rng.integers(HEADER_BYTES * headers_of(packet))] = rng.integers(256)
    elif damage == "payload" and len(packet) > HEADER_BYTES:
        for _ in range(rng.integers(1, 4)):
            packet[rng.integers(HEADER_BYTES, len(packet))] ^= np.uint8(1 << int(rng.integers(8)))
    elif damage == "cut":
        arriving[number] = packet[: rng.integers(len(packet))]
    elif damage == "longer":
        arriving[number] = np.append(packet, rng.integers(0, 256, int(rng.integers(1, 20)), np.uint8))
    elif damage == "lost" and len(arriving) > 1:
        del arriving[number]
    elif damage == "repeated":
        arriving.insert(number, packet)
    elif damage == "exchanged":
        other = int(rng.integers(len(sent)))
        arriving[number], arriving[other] = arriving[other], arriving[number]
    elif damage == "mixed":
        foreign = in_packets(rng, [stream(rng)])
        arriving[number] = foreign[int(rng.integers(len(foreign)))]
    changed = len(arriving) != len(sent) or any(ours.tobytes() != theirs.tobytes() for ours, theirs in zip(arriving, sent))
    return damage if changed else "nothing", arriving


def headers_of(packet: np.ndarray) -> int:
    """How many headers a packet begins with."""
    count = 1
    while LAYOUT.unpack_from(packet, HEADER_BYTES * (count - 1))[7]:
        count += 1
    return count


def change_field(rng: np.random.Generator, packet: np.ndarray, at: int) -> None:
    fields = list(LAYOUT.unpack_from(packet, at))
    place = int(rng.integers(2, len(fields)))
    most = 255 if place < 8 else MOST[place < len(fields) - 1]
    what = rng.integers(4)
    if what == 0:
        value = int(rng.choice(np.array(NUMBERS, object)))
    elif what == 1:
        value = int(rng.integers(6))
    elif what == 2:
        value = int(fields[place]) + int(rng.integers(-2, 3))
    else:
        value = int(fields[int(rng.integers(8, len(fields)))])
    fields[place] = min(max(value, 0), most)
    LAYOUT.pack_into(packet, at, *fields)


def resealed(packet: np.ndarray) -> np.ndarray:
    """A packet whose headers have checksums that match."""
    out = packet.copy()
    for at in range(0, len(out) - HEADER_BYTES + 1, HEADER_BYTES):
        raw = out[at : at + LAYOUT.size].tobytes()
        out[at + LAYOUT.size : at + HEADER_BYTES] = np.frombuffer(struct.pack("<I", zlib.crc32(raw)), np.uint8)
        if not LAYOUT.unpack(raw)[7]:
            break
    return out


def check(each: SparseStream) -> None:
    """That a stream is valid."""
    demand(0 <= each.lo <= each.hi <= each.size and each.stored <= each.extent, "a range makes no sense")
    demand(len(each._stored) == each.stored, "there are more or fewer values")
    if each.is_dense:
        demand(each.stored == each.extent, "a dense stream does not fill its range")
        return
    indices = each._entries()[0]
    demand(len(indices) == each.stored and increasing(indices), "indices do not increase")
    demand(not len(indices) or each.lo <= int(indices[0]) <= int(indices[-1]) < each.hi, "indices leave the range")
    if isinstance(each, CodedStream):
        values = np.empty(each._stored.shape, each.dtype)
        demand(each.codec.decode(each.coded, values.reshape(-1)), "the coded form is of no values")
        demand(values.tobytes() == each._stored.tobytes(), "the coded form is of other values")


def increasing(indices: np.ndarray) -> bool:
    return bool((indices[1:] > indices[:-1]).all())


def same(ours: SparseStream, theirs: SparseStream) -> bool:
    names = ("size", "lo", "hi", "dtype", "width", "is_dense", "stored")
    parts = [(each._stored, None if each.is_dense else each._entries()[0], each._present) for each in (ours, theirs)]
    equal = all(a is b or (a is not None and b is not None and a.tobytes() == b.tobytes()) for a, b in zip(*parts))
    return equal and all(getattr(ours, name) == getattr(theirs, name) for name in names)


if __name__ == "__main__":
    main(__doc__.splitlines()[0], run)
