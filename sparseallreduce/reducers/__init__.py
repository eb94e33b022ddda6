"""Lossy sums: every rank holds a dense vector, and the ranks agree on the sum of a few of its values."""

from sparseallreduce.reducers.base import Reduced, Reducer
from sparseallreduce.reducers.feedback import ErrorFeedback
from sparseallreduce.reducers.topka import TopkA

__all__ = ["ErrorFeedback", "Reduced", "Reducer", "TopkA"]
