"""Inputs and oracles for the lossy family: accumulators of all ranks, gradients over many steps, and top-k in plain NumPy."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import sparseallreduce as sar

REDUCERS = {
    "gtopk": sar.GTopk,
    "gtopk by allgather": lambda size, k: sar.GTopk(size, k, form="allgather"),
    "gaussiank": sar.GaussianK,
    "oktopk": sar.OkTopk,
    "topka": sar.TopkA,
    "topkdsa": sar.TopkDSA,
    "topkdsa, dense parts": lambda size, k: sar.TopkDSA(size, k, algorithm="dsar_split_allgather"),
}
# Most operations of up to 9 ranks, powers of two and not: what goes wrong at 32 goes wrong at 9, and takes a tenth of the messages.
# A branch that `one_of` is given twice counts once.
RANKS = st.integers(1, 16).flatmap(lambda drawn: st.integers(6, 32) if drawn == 16 else st.integers(1, 9))
INTEGERS, REAL = "small integers", "real numbers"


@dataclass(frozen=True)
class Vectors:
    """What every rank passes to one operation after another: a specification, of which the arrays are made by a seeded generator."""

    ranks: int
    size: int
    k: int
    dtype: str = "float32"
    contents: str = REAL
    places: str = "anywhere"  # of the k largest: "anywhere", the "same" on all ranks, "disjoint" if they fit, or all in one "region"
    seed: int = 0

    def step(self, number: int) -> list[NDArray[Any]]:
        """The vectors of all ranks at a step."""
        rng = np.random.default_rng([self.seed, number])
        common = rng.permutation(self.size)
        return [self._vector(rng, rank, common) for rank in range(self.ranks)]

    @cached_property
    def first(self) -> list[NDArray[Any]]:
        return self.step(0)

    def reducers(self, make: Any, **options: Any) -> list[sar.Reducer]:
        return [make(self.size, self.k, **options) for _ in range(self.ranks)]

    def _vector(self, rng: np.random.Generator, rank: int, common: NDArray[Any]) -> NDArray[Any]:
        if self.contents == INTEGERS:
            vector = rng.integers(-3, 4, self.size).astype(self.dtype)
        else:
            vector = rng.normal(0, 1, self.size).astype(self.dtype)
        places = {
            "anywhere": rng.permutation(self.size),
            "same": common,
            "disjoint": common[rank :: self.ranks],
            "region": np.arange(self.size),
        }[self.places][: self.k]
        vector[places] += np.copysign(10, vector[places])
        return vector


def vectors(ranks: st.SearchStrategy[int] | None = None, contents: tuple[str, ...] = (INTEGERS, REAL)) -> st.SearchStrategy[Vectors]:
    """Few elements, fewer than ranks too; k from 1 to all."""

    @st.composite
    def drawn(draw: st.DrawFn) -> Vectors:
        size = draw(st.one_of(st.integers(0, 5), st.integers(1, 60), st.integers(1, 200)))
        return Vectors(
            ranks=draw(RANKS if ranks is None else ranks),
            size=size,
            k=draw(st.one_of(st.integers(min(1, size), size), st.integers(min(1, size), max(min(1, size), size // 8)))),
            dtype=draw(st.sampled_from(["float32", "float64"])),
            contents=draw(st.sampled_from(contents)),
            places=draw(st.sampled_from(["anywhere", "same", "disjoint", "region"])),
            seed=draw(st.integers(0, 2**32 - 1)),
        )

    return drawn()


def top(vector: NDArray[Any], k: int) -> NDArray[Any]:
    """``vector`` with all but its k values of largest magnitude set to zero; of equals, those of lower index stay."""
    order = np.lexsort([np.arange(len(vector)), -np.abs(vector)])[:k]
    kept = np.zeros_like(vector)
    kept[order] = vector[order]
    return kept


def tree(accumulators: list[NDArray[Any]], k: int) -> NDArray[Any]:
    """gTop-k algorithm 3, one rank after the other: in every round the lower of two ranks keeps the top k of both sums."""
    sums, distance = [top(accumulator, k) for accumulator in accumulators], 1
    while distance < len(sums):
        for rank in range(0, len(sums) - distance, 2 * distance):
            sums[rank] = top(sums[rank] + sums[rank + distance], k)
        distance *= 2
    return sums[0]


def words(stream: sar.SparseStream) -> int:
    """Of a stream as the papers count: one for each value, and one for its index."""
    return stream.stored if stream.is_dense else 2 * stream.stored
