"""TopkA: every rank's top k, gathered on all ranks (Ok-Topk section 2.2, gTop-k algorithm 1)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from sparseallreduce.algorithms.allgather import allgather
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.reducers.base import Array, Reduced, Reducer, Reducing
from sparseallreduce.reducers.local import LocalSelection
from sparseallreduce.streams.kernels.backend import on_device
from sparseallreduce.streams.selection import ExactTopK, Selector
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire.values import VALUE_CODECS, quantised

__all__ = ["TopkA"]


class TopkA(LocalSelection):
    """The sum of the ranks' top k by an allgather.

    Latency log2(P) alpha; every rank receives 2 k (P - 1) words. The sum has from k entries (the same on all ranks) to k P.

    With a ``value_codec`` values are sent in fewer bits, and ``returned`` holds the quantisation errors, which error feedback keeps. With
    :class:`~sparseallreduce.streams.selection.ChunkTopK` and 2 bits a value this is SparseLoCo's sum (Sarfi et al., 2025, algorithm 1).

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    selector : callable, optional
        Returns the selector of each rank's values, given k; the exact top k by default.
    hosts : bool
        Whether to reduce between hosts, as for :class:`~sparseallreduce.Reducer`.
    value_codec : str
        Encoding of values: "exact"; "float16" or "bfloat16"; "qsgd8" or "qsgd4", unbiased random levels; or "qsgd2", a sign and one of two
        magnitudes of every 256 values, which is biased and needs error feedback.
    seed : int
        Seed of "qsgd8" and "qsgd4".

    Raises
    ------
    AlgorithmError
        If the codec is unknown; also in an operation on a GPU, which requires "exact".

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> accumulators = np.float32([[3, 0, -1, 0], [0, 2, -4, 1]])
    >>> out = sar.simulate(list(accumulators), algorithm=[sar.TopkA(4, k=1) for _ in range(2)])
    >>> out.outputs[0].update.to_dense(), out.outputs[1].contributed
    (array([ 3.,  0., -4.,  0.], dtype=float32), array([2], dtype=uint32))
    """

    value_codec: str
    seed: int

    name = "topka"

    def __init__(
        self,
        size: int,
        k: int,
        *,
        selector: Callable[[int], Selector] = ExactTopK,
        hosts: bool = False,
        value_codec: str = "exact",
        seed: int = 0,
    ) -> None:
        codecs = ["exact", *(codec.name for codec in VALUE_CODECS.values())]
        if value_codec not in codecs:
            raise AlgorithmError(f"there is no value_codec {value_codec!r} of reducers: there are {', '.join(codecs)}")
        self.value_codec, self.seed = value_codec, seed
        super().__init__(size, k, selector=selector, hosts=hosts)

    def options(self) -> dict[str, Any]:
        coded = {} if self.value_codec == "exact" else {"value codec": self.value_codec, "seed": self.seed}
        return super().options() | coded

    def _flat(self, size: int, k: int) -> Reducer:
        return TopkA(size, k, selector=self._make_selector, value_codec=self.value_codec, seed=self.seed)

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        chosen = self.select(accumulator, gradient)
        total = yield from allgather(self._coded(chosen, rank), rank, ranks, self.reduction)
        return Reduced(self.reduction.leave(total), chosen.indices)

    def _coded(self, chosen: SparseStream, rank: int) -> SparseStream:
        """Return a stream with the values that its receivers decode; the errors are stored in ``returned``."""
        if self.value_codec == "exact":
            return chosen
        if on_device(chosen._stored):
            raise AlgorithmError(f"values on a GPU are always sent exactly: leave out value_codec={self.value_codec!r}")
        digest = hashlib.blake2b(repr((self.seed, self.steps, rank)).encode(), digest_size=8).digest()
        coded = quantised(chosen, self.value_codec, int.from_bytes(digest, "little"))
        lacking = chosen._stored - coded._stored
        if chosen.is_dense:
            self.returned = SparseStream._dense_form(lacking, chosen.size)
        else:
            self.returned: SparseStream = SparseStream._sparse_form(chosen._entries()[0], lacking, chosen.size)
        return coded
