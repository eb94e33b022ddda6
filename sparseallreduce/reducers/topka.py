"""TopkA: every rank's top k, gathered on all ranks (Ok-Topk section 2.2, gTop-k algorithm 1)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.reducers.base import Array, Reduced, Reducer, Reducing
from sparseallreduce.reducers.local import LocalSelection
from sparseallreduce.streams.kernels.backend import array_module, on_device
from sparseallreduce.streams.reduction import Reduction
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
    average : str
        What error feedback divides a value of the sum by: "ranks", their number; or "senders", the number of ranks that sent this value, as
        the authors of SparseLoCo do in their program. An index that few ranks select then changes as much as one that all select.

    Raises
    ------
    AlgorithmError
        If the codec or ``average`` is unknown, or if ``average`` is "senders" and ``hosts`` is true; also in an operation on a GPU, which
        requires "exact".

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
    average: str

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
        average: str = "ranks",
    ) -> None:
        codecs = ["exact", *(codec.name for codec in VALUE_CODECS.values())]
        if value_codec not in codecs:
            raise AlgorithmError(f"there is no value_codec {value_codec!r} of reducers: there are {', '.join(codecs)}")
        if average not in ("ranks", "senders"):
            raise AlgorithmError(f"average is 'ranks' or 'senders', not {average!r}")
        if hosts and average == "senders":
            raise AlgorithmError("hosts add the values of their ranks first, which hides the senders: leave out hosts or average='senders'")
        self.value_codec, self.seed, self.average = value_codec, seed, average
        self._senders: Array | None = None
        super().__init__(size, k, selector=selector, hosts=hosts)

    def options(self) -> dict[str, Any]:
        coded = {} if self.value_codec == "exact" else {"value codec": self.value_codec, "seed": self.seed}
        return super().options() | {"average": self.average} | coded

    def _flat(self, size: int, k: int) -> Reducer:
        return TopkA(size, k, selector=self._make_selector, value_codec=self.value_codec, seed=self.seed)

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        chosen = self.select(accumulator, gradient)
        parts = yield from gather_parts(self._coded(chosen, rank), rank, ranks)
        self._senders = _senders(parts) if self.average == "senders" else None
        return Reduced(self.reduction.leave(self.reduction.same_nans(self.reduction.many(parts))), chosen.indices)

    def divisor(self, ranks: int) -> int | Array:
        senders, self._senders = self._senders, None
        return ranks if senders is None else senders

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


def _senders(parts: Sequence[SparseStream]) -> Array:
    """Return the number of streams that have each entry of the sum of ``parts``, in the order and the dtype of its stored values."""
    counted = Reduction().many([_ones(part) for part in parts])._stored
    counts: Array = array_module(counted).maximum(counted, 1)  # a dense sum also stores what no rank has sent
    return counts


def _ones(part: SparseStream) -> SparseStream:
    """Return a stream with ones in the place of the non-zero values."""
    ones = (part._stored != 0).astype(part.dtype)
    if part.is_dense:
        return SparseStream._dense_form(ones, part.size, part.lo, part.hi)
    return SparseStream._sparse_form(part._entries()[0], ones, part.size, part.lo, part.hi)
