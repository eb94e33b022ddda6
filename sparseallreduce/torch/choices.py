"""What optimisers have that choose a reducer for each bucket: what they expect of each."""

from __future__ import annotations

from sparseallreduce.reducers import Auto, ReducerChoice
from sparseallreduce.runtime.objects import collective
from sparseallreduce.streams.kernels.backend import on_device
from sparseallreduce.torch.optimizer import DistributedOptimizer

__all__ = ["ChoosingOptimizer"]


class ChoosingOptimizer(DistributedOptimizer):
    """A :class:`DistributedOptimizer` whose sums are those of :class:`~sparseallreduce.Auto`."""

    @collective
    def explain(self) -> list[ReducerChoice]:
        """What is chosen, and what is expected of each candidate, for each bucket that has residuals, in their order. Collective.

        Before the first step buckets are laid out as if all gradients were dense tensors.

        Returns
        -------
        list of ReducerChoice
            The same on all ranks; ``print`` shows each as a table.
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
