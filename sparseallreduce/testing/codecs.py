"""``check_codec``: whether a codec of positions or of values keeps what the wire format needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseallreduce.streams.wire.codecs import IndexCodec
from sparseallreduce.streams.wire.values import ValueCodec
from sparseallreduce.testing.report import Report, expect

__all__ = ["check_codec"]

_BLOCK = 512  # values behind which messages may be cut
_KEYS = 400  # draws of each value, of which the mean is compared


def check_codec(codec: ValueCodec | IndexCodec, *, biased: bool = False, examples: int = 200, seed: int = 0) -> Report:
    """Check that what a codec writes is read back, that damaged bytes are refused, and that values are right on the mean.

    Parameters
    ----------
    codec : ValueCodec or IndexCodec
    biased : bool
        As for :func:`~sparseallreduce.register_codec`; the mean is not compared then.
    examples : int
        Arrays to try.
    seed : int
        Seed of the examples.

    Returns
    -------
    Report

    Raises
    ------
    CheckFailure
        For the first promise that does not hold.

    Examples
    --------
    >>> from sparseallreduce.streams.wire.codecs import GAPS
    >>> print(check_codec(GAPS, examples=50))
    codec 'gaps': all promises hold
      positions are read back as they were written                          50 examples
      bytes are refused that are not those of so many positions             78 examples
    """
    report, rng = Report(f"codec {getattr(codec, 'name', codec)!r}"), np.random.default_rng(seed)
    for example in range(examples):
        if isinstance(codec, ValueCodec):
            _check_values(report, codec, rng, example)
        else:
            _check_positions(report, codec, rng, example)
    if isinstance(codec, ValueCodec) and not biased:
        _check_mean(report, codec, rng)
    return report


def _check_positions(report: Report, codec: IndexCodec, rng: np.random.Generator, example: int) -> None:
    size = int(rng.choice([1, 2, 100, 5000, 2**32, 2**40]))
    room = min(size, 5000)
    count = int(rng.integers(0, room + 1)) if example % 3 else min(example, room)
    lo = int(rng.integers(0, 2)) * (size - room)
    dtype = np.uint32 if size <= 2**32 else np.uint64
    indices = (np.sort(rng.permutation(room)[:count]) + lo).astype(dtype)

    def described() -> str:
        return f"{count} positions of {dtype.__name__} within [{lo}, {lo + room}): {indices[:8].tolist()}{' ...' * (count > 8)}"

    with report.promise("positions are read back as they were written", described):
        bound = codec.bound(indices, lo)
        out = np.full(bound + 8, 0xA5, np.uint8)
        written = codec.write(indices, lo, out)
        expect(written <= bound, f"it writes {written} bytes where its bound is {bound}")
        expect((out[bound:] == 0xA5).all(), "it writes behind its bound")
        back = np.zeros(count, dtype)
        expect(codec.read(out[:written].copy(), lo, lo + room, back), "it refuses what it has written")
        expect(back.tobytes() == indices.tobytes(), f"it reads {back[:8].tolist()}")
    if count > 1:
        for damaged, room_for in ((out[: written - 1].copy(), count), (out[:written].copy(), count + 1)):
            with report.promise("bytes are refused that are not those of so many positions", described):
                back = np.zeros(room_for, dtype)
                accepted = codec.read(damaged, lo, lo + room, back)
                expect(not accepted, f"it accepts {len(damaged)} of {written} bytes for {room_for} positions")


def _check_values(report: Report, codec: ValueCodec, rng: np.random.Generator, example: int) -> None:
    count = int(rng.choice([0, 1, 2, 7, _BLOCK - 1, _BLOCK, _BLOCK + 1, 3 * _BLOCK]))
    dtype = np.dtype(("float32", "float64")[example % 2])
    values = rng.normal(0, 10.0 ** rng.integers(-3, 4), count).astype(dtype)

    def described() -> str:
        return f"{count} values of {dtype.name}, from {values.min(initial=0):g} to {values.max(initial=0):g}"

    with report.promise("values that are decoded are the same for all who decode them", described):
        coded = codec.empty(count)
        position = codec.encode(values.copy(), 12345, coded)
        expect(position < 0, f"it cannot hold the value at position {position}")
        first, second = np.empty_like(values), np.full_like(values, np.nan)
        copies = tuple(array.copy() for array in coded)
        expect(codec.decode(coded, first) and codec.decode(copies, second), "it refuses what it has written")
        expect(first.tobytes() == second.tobytes(), "two who decode the same bytes have other values")
        again = codec.empty(count)
        codec.encode(values.copy(), 12345, again)
        expect(all(np.array_equal(one, two) for one, two in zip(coded, again)), "the same key gives other bytes")
    if count > _BLOCK:
        with report.promise("a coded form can be cut at multiples of a block", described):
            part = np.empty(count - _BLOCK, dtype)
            expect(codec.decode(codec.cut(coded, _BLOCK, count - _BLOCK), part), "it refuses a part of what it has written")
            expect(part.tobytes() == first[_BLOCK:].tobytes(), "a part has other values than the whole")


def _check_mean(report: Report, codec: ValueCodec, rng: np.random.Generator) -> None:
    values: Any = rng.normal(0, 1, 64)
    with report.promise("the mean of what is decoded is the value", lambda: f"64 normal values, {_KEYS} keys"):
        drawn = np.empty((_KEYS, len(values)))
        for key in range(_KEYS):
            coded = codec.empty(len(values))
            codec.encode(values.copy(), key, coded)
            codec.decode(coded, drawn[key])
        error, deviation = np.abs(drawn.mean(0) - values), drawn.std(0) / np.sqrt(_KEYS)
        rounding = 2.0**-8 * np.abs(values)  # of a format with 8 bits of mantissa
        worst = int(np.argmax(error - 6 * deviation - rounding))
        allowed = 6 * deviation[worst] + rounding[worst]
        expect(error[worst] <= allowed, f"the value {values[worst]:g} is {drawn[:, worst].mean():g} on the mean: give biased=True")
