"""Hypothesis strategies for streams and for whole operations.

A drawn case is a small specification, and its arrays are made from it by a seeded generator: that shrinks to a readable example,
and draws 64 ranks as fast as one.
"""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st
from oracle import Entries

from sparseallreduce import Operator, SparseStream
from sparseallreduce.streams import dtypes
from sparseallreduce.streams.operator import OPERATORS

DTYPES = tuple(dtype.name for dtype in dtypes.DTYPES)
SMALL, REAL, SPECIAL = "small integers", "real numbers", "NaN, infinities and zeros"


def _greater(a: Any, b: Any, out: Any = None) -> Any:
    """Neither a ufunc nor compiled: the greater of two numbers, or the one that is a number."""
    with np.errstate(invalid="ignore"):  # NumPy's fmax says so of some NaNs of 16 bits
        return np.fmax(a, b, out=out)


def _beaten_by_all(dtype: Any) -> Any:
    return np.iinfo(dtype).min if dtype.kind == "i" else np.nan


def some_nans(rng: np.random.Generator, count: int, dtype: Any) -> Any:
    """Quiet NaNs of either sign and of any payload, of a real floating-point dtype."""
    dtype = np.dtype(dtype)
    bits, sign = np.dtype(f"u{dtype.itemsize}"), 8 * dtype.itemsize - 1
    quiet = int(np.array([np.nan], dtype).view(bits)[0]) & ((1 << sign) - 1)
    payloads = rng.integers(0, quiet & -quiet, count, dtype=np.uint64) | quiet
    return (payloads | rng.integers(0, 2, count, dtype=np.uint64) << np.uint64(sign)).astype(bits).view(dtype)


CUSTOM = Operator("greater", _greater, _beaten_by_all)
ALL_OPERATORS = {**OPERATORS, CUSTOM.name: CUSTOM}


@dataclass(frozen=True)
class Case:
    """What every rank contributes to one operation: the specification of its streams."""

    ranks: int
    size: int
    dtype: str
    width: int | None
    op: str
    fill: str  # how many entries a rank has
    overlap: str  # where
    contents: str  # which values
    form: str  # how the streams are made
    seed: int

    @property
    def operator(self) -> Operator:
        return ALL_OPERATORS[self.op]

    @property
    def exact(self) -> bool:
        """Whether the reduction rounds nowhere, in any order."""
        return self.contents != REAL

    @cached_property
    def entries(self) -> list[Entries]:
        rng = np.random.default_rng(self.seed)
        common = rng.permutation(self.size)
        return [self._entries(rng, rank, common) for rank in range(self.ranks)]

    @cached_property
    def streams(self) -> list[SparseStream]:
        rng = np.random.default_rng(self.seed + 1)
        return [self._stream(entries, rng) for entries in self.entries]

    def _entries(self, rng: np.random.Generator, rank: int, common: Any) -> Entries:
        fill = rng.choice(["none", "one", "few", "half", "all"]) if self.fill == "mixed" else self.fill
        most = {"none": 0, "one": 1, "few": self.size // 8 + 1, "half": self.size * 2 // 3, "all": self.size}[fill]
        nnz = int(min(self.size, most if fill in ("one", "all") else rng.integers(0, most + 1)))
        if self.overlap == "same":
            chosen = common[:nnz]
        elif self.overlap == "disjoint":
            chosen = common[rank :: self.ranks][:nnz]
        elif self.overlap == "clustered":
            start = rng.integers(0, self.size - nnz + 1)
            chosen = np.arange(start, start + nnz)
        else:
            chosen = rng.choice(self.size, nnz, replace=False)
        indices = np.sort(chosen).astype(np.uint64)
        values = self._values(rng, len(indices))
        if self.form == "from dense":  # which keeps the non-zeros only
            kept = values != 0 if values.ndim == 1 else (values != 0).any(axis=1)
            indices, values = indices[kept], values[kept]
        return Entries(indices, values)

    def _values(self, rng: np.random.Generator, nnz: int) -> Any:
        if np.dtype(self.dtype).kind == "c":
            real, imag = (self._reals(rng, nnz, "float64") for _ in range(2))
            values = np.empty(real.shape, self.dtype)
            values.real, values.imag = real, imag  # not by a product, which makes NaN of an infinity
            return values
        return self._reals(rng, nnz, self.dtype)

    def _reals(self, rng: np.random.Generator, nnz: int, dtype: str) -> Any:
        shape = (nnz,) if self.width is None else (nnz, self.width)
        if self.contents == REAL:
            values = rng.uniform(0.9, 1.1, shape) * rng.choice([-1, 1], shape) if self.op == "prod" else rng.normal(0, 10, shape)
        elif self.op == "prod":
            largest = 2 if self.ranks <= 8 else 1  # a product of 64 would overflow a float16
            values = rng.integers(-largest, largest + 1, shape)
        else:
            largest = min(9, 256 // self.ranks) if self.dtype == "bfloat16" else 9  # above 256 it has not all integers
            values = rng.integers(-largest, largest + 1, shape)
        values = values.astype(dtype)
        if self.contents == SPECIAL:
            special = np.array([0, np.iinfo(dtype).min] if values.dtype.kind == "i" else [np.inf, -np.inf, -0.0, 0.0], dtype)
            if values.dtype.kind != "i":
                special = np.concatenate([np.array([np.nan, -np.nan], dtype), some_nans(rng, 3, dtype), special])
            chosen = rng.random(shape) < 0.4
            values[chosen] = special[rng.integers(0, len(special), np.count_nonzero(chosen))]
        return values

    def _stream(self, entries: Entries, rng: np.random.Generator) -> SparseStream:
        if self.form == "from dense":
            array = np.zeros((self.size, *entries.values.shape[1:]), self.dtype)
            array[entries.indices] = entries.values
            return SparseStream.from_dense(array, switch_density=rng.choice([None, 0.0, 0.1]))
        density = rng.choice([None, 0.0, 0.05]) if self.form == "low switch point" else None
        return SparseStream(entries.indices.astype(np.uint32), entries.values, self.size, switch_density=density)


def sizes(ranks: int) -> st.SearchStrategy[int]:
    """Dimensions: 0, 1, below P, about P, divisible by P and not."""
    return st.one_of(
        st.sampled_from([0, 1, 2]),
        st.integers(0, 2 * ranks + 1),
        st.integers(0, 5).map(lambda times: times * ranks),
        st.integers(0, 300),
    )


# Most operations of up to 9 ranks: what goes wrong at 64 goes wrong at 9, and a hundred times sooner. A branch that `one_of` is given
# twice counts once.
RANKS = st.integers(1, 6).flatmap(lambda drawn: {5: st.integers(6, 20), 6: st.integers(1, 64)}.get(drawn, st.integers(1, 9)))


@st.composite
def cases(draw: st.DrawFn, ranks: st.SearchStrategy[int] = RANKS, contents: tuple[str, ...] = (SMALL, REAL, SPECIAL)) -> Case:
    """Operations: any number of ranks, dimension, fill, overlap, dtype, width, operator, contents and form."""
    number = draw(ranks)
    dtype = draw(st.sampled_from(DTYPES))
    operators = ["sum", *ALL_OPERATORS]
    if np.dtype(dtype).kind == "c":
        operators = ["sum", "sum", "prod", CUSTOM.name]
    op = draw(st.sampled_from(operators))
    if np.dtype(dtype).kind == "c" and op != "sum":  # of infinite factors, which parts are NaN depends on their order
        contents = tuple(kind for kind in contents if kind != SPECIAL) or (SMALL,)
    return Case(
        ranks=number,
        size=draw(sizes(number)),
        dtype=dtype,
        width=draw(st.sampled_from([None, None, None, 1, 3])),
        op=op,
        fill=draw(st.sampled_from(["mixed", "none", "one", "few", "half", "all"])),
        overlap=draw(st.sampled_from(["uniform", "same", "disjoint", "clustered"])),
        contents=draw(st.sampled_from(contents)),
        form=draw(st.sampled_from(["constructor", "low switch point", "from dense"])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


class Delivery:
    """A chooser for the simulator: which rank runs, or which message arrives, of n possibilities."""

    def __init__(self, name: str, picks: tuple[int, ...] = ()) -> None:
        self.name, self.picks = name, picks
        self._random = random.Random(len(picks))
        self._asked = 0
        self._starved = picks[0] if picks else 0

    def __call__(self, possibilities: int) -> int:
        self._asked += 1
        if self.name == "first":
            return 0
        if self.name == "last":
            return possibilities - 1
        if self.name == "drawn":
            return self.picks[self._asked % len(self.picks)] % possibilities
        return self._starving(possibilities)

    def _starving(self, possibilities: int) -> int:
        """One rank, or the message that stands in its place, only when nothing else is possible."""
        if possibilities == 1:
            return 0
        starved = min(self._starved, possibilities - 1)
        choice = self._random.randrange(possibilities - 1)
        choice += choice >= starved
        self._starved = starved - (choice < starved)
        return choice

    def __repr__(self) -> str:
        return f"Delivery({self.name!r}, {self.picks})"


def deliveries() -> st.SearchStrategy[Any]:
    """Orders of delivery: by time, seeds for an arbitrary one, always the oldest, always the newest, one rank starved, drawn."""
    return st.one_of(
        st.none(),
        st.integers(0, 2**32 - 1),
        st.builds(Delivery, st.sampled_from(["first", "last"])),
        st.builds(Delivery, st.just("starving"), st.tuples(st.integers(0, 63))),
        st.builds(Delivery, st.just("drawn"), st.lists(st.integers(0, 999), min_size=1, max_size=30).map(tuple)),
    )
