"""Approximate top-k: each value is selected with a probability that grows with its magnitude (thesis sections 2.4.1 and 4.3.3)."""

from __future__ import annotations

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.selection.base import Array, Selector
from sparseallreduce.streams.selection.seeds import seed_of
from sparseallreduce.streams.stream import index_dtype

__all__ = ["ApproximateTopK"]

FORMS = ("expected", "at most")
CACHED = 2**15  # values that stay in the L2 cache between the computation of norms and the drawing


class ApproximateTopK(Selector):
    """Selects values independently of each other with probabilities p_i, k of them in expectation.

    Parameters
    ----------
    k : int
        Expected number of selected values; each bucket has its share.
    form : {"expected", "at most"}
        "expected": p_i = k abs(v_i) / norm1, with abs(v_i) + eps in place of abs(v_i), for the smallest eps that leaves all at most 1. "at
        most": p_i = min(1, k abs(v_i) / norm1), which selects fewer if single magnitudes are very large.
    bucket : int or None
        Values in a bucket, which has its own norm, 512 in the thesis; None uses one bucket for the whole vector.
    fixed : bool
        Select exactly the rounded share of k in each bucket, at least 1: further values are dropped, and missing ones are filled with zeros
        at positions that were not drawn.
    seed : int
        Seed. The result depends on it, on the number of previous selections, and on the values.

    Notes
    -----
    Probabilities are compared with random numbers of 24 bits, hashes of the positions. Non-finite values are always selected, and are not
    part of norms.

    Examples
    --------
    >>> import numpy as np
    >>> ApproximateTopK(2, fixed=True)(np.array([0.0, -3.0, 0.0, 0.0, 3.0, 0.0])).indices
    array([1, 4], dtype=uint32)
    """

    def __init__(self, k: int, *, form: str = "expected", bucket: int | None = 512, fixed: bool = False, seed: int = 0) -> None:
        super().__init__(k)
        if form not in FORMS:
            raise StreamError(f"the forms of probabilities are {' and '.join(map(repr, FORMS))}, not {form!r}")
        if bucket is not None and bucket < 1:
            raise StreamError(f"bucket is a number of values, at least 1, not {bucket}")
        self.form = form
        self.bucket = bucket
        self.fixed = fixed
        self.seed = seed
        self.steps: int = 0

    @property
    def passes(self) -> float:
        return 3.0 if self.bucket is not None and self.bucket <= CACHED else 4.0

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        size = len(accumulator)
        bucket = max(1, min(size, self.bucket or size))
        share = self.k * bucket / max(1, size)
        chosen = loops.draw(
            accumulator,
            gradient,
            index_dtype(size),
            bucket=bucket,
            share=share,
            at_most=self.form == "at most",
            fixed=max(1, round(share)) if self.fixed and self.k else 0,
            seed=seed_of(self.seed, self.steps),
            clear=clear,
        )
        self.steps += 1
        return chosen
