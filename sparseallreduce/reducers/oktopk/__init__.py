"""Ok-Topk: a sparse allreduce with O(k) words, whatever the number of ranks (Ok-Topk section 3)."""

from sparseallreduce.reducers.oktopk.reducer import OkTopk

__all__ = ["OkTopk"]
