"""HiTopKComm: dense sums inside every host, and the top k of them between hosts (CommLib section 3.2, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable

from sparseallreduce.reducers.topka import TopkA
from sparseallreduce.streams.selection import MSTopK, Selector

__all__ = ["HiTopK"]


class HiTopK(TopkA):
    """The sum of the hosts' top k, where a host's values are the dense sums of its ranks' vectors.

    The algorithm has four steps, with n ranks on each of m hosts:

    1. Dense reduce-scatter inside every host: each rank obtains the sums of a part of N/n values.
    2. It selects k/n values of its part, rounded up, by MSTopK.
    3. The ranks at one place of all hosts gather the selected values, and add them.
    4. The ranks of a host gather the parts: up to k m values.

    Between hosts a rank receives 2 (m - 1) k/n words, values and their indices (the paper's equation 9 counts the values alone, and so does
    equation 10, by which it receives up to (n - 1) m k/n of them inside its host; with indices, twice that). Inside its host it sends and
    receives N (n - 1)/n values in step 1 (equation 7). If hosts have different numbers of ranks, n is that of the smallest, and further
    ranks send their values to the first n.

    With error feedback nothing is lost: values of a part that are not selected stay in the residual of the rank that has the part.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    selector : callable, optional
        Returns the selector of a part's values, given k/n; :class:`~sparseallreduce.streams.selection.MSTopK` by default.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> accumulators = np.float32([[3, 0, -1, 0], [0, 2, -1, 1], [0, 0, 0, 1], [0, 0, 0, 3]])
    >>> reducers = [sar.HiTopK(4, k=2) for _ in range(4)]
    >>> out = sar.simulate(list(accumulators), reducers, sar.Network(hosts=2))
    >>> out.outputs[0].update.to_dense(), reducers[1].returned.lo, reducers[1].returned.to_dense()
    (array([ 3.,  0., -2.,  4.], dtype=float32), 2, array([0., 0., 0., 1.], dtype=float32))
    """

    name = "hitopk"

    def __init__(self, size: int, k: int, *, selector: Callable[[int], Selector] = MSTopK) -> None:
        super().__init__(size, k, selector=selector, hosts=True)
