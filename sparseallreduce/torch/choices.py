"""Optimisers that choose a reducer for each bucket, and explain their choices."""

from __future__ import annotations

from sparseallreduce.reducers import Auto, ReducerChoice
from sparseallreduce.runtime.objects import collective
from sparseallreduce.streams.kernels.backend import on_device
from sparseallreduce.torch.optimizer import DistributedOptimizer

__all__ = ["ChoosingOptimizer"]


class ChoosingOptimizer(DistributedOptimizer):
    """A :class:`DistributedOptimizer` whose reducers are chosen by :class:`~sparseallreduce.Auto`."""

    @collective
    def explain(self) -> list[ReducerChoice]:
        """Return the reducer chosen for each bucket with a residual, and the expected time of every candidate. Collective.

        Before the first step, the buckets are laid out as if no gradient were a sparse tensor.

        Returns
        -------
        list of ReducerChoice
            One choice for each bucket, the same on all ranks. ``print`` shows a choice as a table.
        """
        self._expect_idle()
        found = []
        for bucket in self._buckets or self._arranged_anew(self._members):
            if bucket.feedback is not None and isinstance(bucket.feedback.reducer, Auto):
                reducer, k = bucket.feedback.reducer, bucket.k(self.steps)
                of_step = reducer if reducer.k == k else self._make(bucket.size, k)
                assert isinstance(of_step, Auto)
                found.append(of_step.explained(self.comm, bucket.vector.dtype, on_device(bucket.vector)))
        return found
