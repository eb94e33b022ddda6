"""Sparse allreduce over MPI: the sum of vectors with few non-zeros, at a fraction of the cost of a dense ``MPI_Allreduce``.

Create a :class:`SparseStream` on every rank, and pass it to :func:`allreduce`, or to :func:`iallreduce`, which returns a :class:`Request`;
or to :func:`reduce`, :func:`reduce_scatter`, :func:`allgather` or :func:`bcast`. :func:`explain` shows which algorithm they use, and
:func:`simulate` runs any number of ranks in one process. The lossy sums are :class:`OkTopk`, :class:`GTopk`, :class:`TopkA`,
:class:`TopkDSA`, :class:`GaussianK`, :class:`HiTopK` and :class:`Auto`, which uses the fastest of them.

>>> import sparseallreduce as sar
>>> stream = sar.SparseStream([1, 4], [10.0, 40.0], size=8)
>>> sar.allreduce(stream, comm=sar.SERIAL).values
array([10., 40.])
"""

from sparseallreduce import plugins
from sparseallreduce.algorithms import algorithms
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.registration import register_algorithm
from sparseallreduce.errors import (
    AlgorithmError,
    DeadlockError,
    ForkError,
    LauncherError,
    MismatchError,
    MPIUnavailableError,
    SparseAllreduceError,
    StreamError,
    StreamTypeError,
    WaitTimeoutError,
    WireError,
)
from sparseallreduce.reducers import (
    Auto,
    ErrorFeedback,
    GaussianK,
    GTopk,
    HiTopK,
    OkTopk,
    Reducer,
    ReducerChoice,
    TopkA,
    TopkDSA,
    explain_reducer,
    register_reducer,
)
from sparseallreduce.runtime.api import Request, allreduce, iallreduce
from sparseallreduce.runtime.devices import local_device
from sparseallreduce.runtime.explaining import Explanation, explain
from sparseallreduce.runtime.family import (
    allgather,
    bcast,
    iallgather,
    ibcast,
    ireduce,
    ireduce_scatter,
    reduce,
    reduce_scatter,
)
from sparseallreduce.runtime.family_plans import allgather_init, bcast_init, reduce_init, reduce_scatter_init
from sparseallreduce.runtime.plan import Plan
from sparseallreduce.runtime.planning import allreduce_init
from sparseallreduce.runtime.serial import SERIAL
from sparseallreduce.runtime.simulator import Network, Simulation, simulate
from sparseallreduce.runtime.trace import Trace, trace
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire.registration import register_codec
from sparseallreduce.version import __version__
from sparseallreduce.versions import show_versions

__all__ = [
    "SERIAL",
    "AlgorithmError",
    "Auto",
    "DeadlockError",
    "ErrorFeedback",
    "Explanation",
    "ForkError",
    "GTopk",
    "GaussianK",
    "HiTopK",
    "LauncherError",
    "MPIUnavailableError",
    "Machine",
    "MismatchError",
    "Network",
    "OkTopk",
    "Operator",
    "Plan",
    "Reducer",
    "ReducerChoice",
    "Request",
    "Simulation",
    "SparseAllreduceError",
    "SparseStream",
    "StreamError",
    "StreamTypeError",
    "TopkA",
    "TopkDSA",
    "Trace",
    "WaitTimeoutError",
    "WireError",
    "__version__",
    "algorithms",
    "allgather",
    "allgather_init",
    "allreduce",
    "allreduce_init",
    "bcast",
    "bcast_init",
    "explain",
    "explain_reducer",
    "iallgather",
    "iallreduce",
    "ibcast",
    "ireduce",
    "ireduce_scatter",
    "local_device",
    "reduce",
    "reduce_init",
    "reduce_scatter",
    "reduce_scatter_init",
    "register_algorithm",
    "register_codec",
    "register_reducer",
    "show_versions",
    "simulate",
    "trace",
]

plugins.load("algorithms", register_algorithm)
plugins.load("reducers", lambda _, kind: register_reducer(kind))
plugins.load("codecs", lambda _, codec: register_codec(codec))
