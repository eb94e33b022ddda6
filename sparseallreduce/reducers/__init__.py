"""Reducers: lossy sums, in which every rank has a dense vector and the ranks agree on the sum of a few of its values."""

from sparseallreduce.reducers.auto import Auto, ReducerChoice, explain_reducer
from sparseallreduce.reducers.base import Reduced, Reducer
from sparseallreduce.reducers.feedback import ErrorFeedback
from sparseallreduce.reducers.gaussiank import GaussianK
from sparseallreduce.reducers.gtopk import GTopk
from sparseallreduce.reducers.hitopk import HiTopK
from sparseallreduce.reducers.oktopk import OkTopk
from sparseallreduce.reducers.topka import TopkA
from sparseallreduce.reducers.topkdsa import TopkDSA

__all__ = [
    "REDUCERS",
    "Auto",
    "ErrorFeedback",
    "GTopk",
    "GaussianK",
    "HiTopK",
    "OkTopk",
    "Reduced",
    "Reducer",
    "ReducerChoice",
    "TopkA",
    "TopkDSA",
    "explain_reducer",
]

#: All reducers by name.
REDUCERS: dict[str, type[Reducer]] = {kind.name: kind for kind in (OkTopk, GTopk, TopkA, TopkDSA, GaussianK, HiTopK, Auto)}
