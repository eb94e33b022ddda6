"""Reducers: lossy sums, in which every rank has a dense vector and the ranks agree on the sum of a few of its values."""

import inspect

from sparseallreduce.errors import AlgorithmError
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
    "register_reducer",
]

#: All reducers by name.
REDUCERS: dict[str, type[Reducer]] = {kind.name: kind for kind in (OkTopk, GTopk, TopkA, TopkDSA, GaussianK, HiTopK, Auto)}
_OWN = frozenset(REDUCERS)


def register_reducer(kind: type[Reducer]) -> None:
    """Add a lossy reducer by its ``name``, which ``bench --lossy`` and ``simulate --lossy`` then take.

    A package can register its reducers without a call, by entry points of the group ``sparseallreduce.reducers``. A reducer needs no
    registration to be used as an object: call its ``allreduce``, or wrap it in :class:`ErrorFeedback`.

    Parameters
    ----------
    kind : type
        A subclass of :class:`Reducer` with a ``name``, made by ``kind(size, k)``, which implements ``reduce``;
        :func:`sparseallreduce.testing.check_reducer` tests it. A name that has been registered before gets the new class.

    Raises
    ------
    AlgorithmError
        If it is no such class, is abstract, or has the name of a reducer of the library.
    """
    if not (isinstance(kind, type) and issubclass(kind, Reducer)) or inspect.isabstract(kind):
        raise AlgorithmError(f"a reducer is a subclass of sparseallreduce.Reducer that implements reduce, not {kind!r}")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or name in _OWN:
        raise AlgorithmError(f"the name of a reducer is a Python identifier that is none of {', '.join(sorted(_OWN))}, not {name!r}")
    REDUCERS[name] = kind
