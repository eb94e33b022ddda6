"""Every exception the library raises.

Each class stands for one kind of mistake, and each derives from a built-in class as well, so that callers who know nothing of
this library catch what they expect (``ValueError`` for a bad stream, ``TypeError`` for a wrong type, ...).
"""

__all__ = [
    "AlgorithmError",
    "CheckpointError",
    "DatasetError",
    "DeadlockError",
    "DivergenceError",
    "ForkError",
    "LauncherError",
    "MismatchError",
    "MPIUnavailableError",
    "SparseAllreduceError",
    "StreamError",
    "StreamTypeError",
    "TrainingStopped",
    "WaitTimeoutError",
    "WireError",
]


class SparseAllreduceError(Exception):
    """Base class of all exceptions of this library.

    Attributes
    ----------
    on_all_ranks : bool
        Whether every rank of the operation raises this same error.
    """

    on_all_ranks = False


class StreamError(SparseAllreduceError, ValueError):
    """The contents of a stream break its invariants: order, range, shape or length."""


class StreamTypeError(SparseAllreduceError, TypeError):
    """An argument is not a stream, or has a dtype that streams do not carry."""


class AlgorithmError(SparseAllreduceError, ValueError):
    """The name of an algorithm or an operator, or one of its options, is not known or out of range."""


class MismatchError(SparseAllreduceError, ValueError):
    """The ranks of one operation disagree on the dimension, dtype, width, operator, algorithm or options."""


class WireError(SparseAllreduceError, ValueError):
    """A message is not a stream: foreign, truncated, altered, or of another version."""


class DeadlockError(SparseAllreduceError, RuntimeError):
    """In the simulator, every unfinished rank waits for a message that nobody will send."""


class WaitTimeoutError(SparseAllreduceError, TimeoutError):
    """An operation was not done within the time that a rank was willing to wait: it has failed on all ranks."""


class MPIUnavailableError(SparseAllreduceError, ImportError):
    """mpi4py or the MPI library beneath it cannot be loaded."""


class LauncherError(SparseAllreduceError, RuntimeError):
    """Raised where a launcher has started several processes and MPI knows of one: nothing would be reduced."""


class ForkError(SparseAllreduceError, RuntimeError):
    """Raised where a process uses a communicator, request, plan or reducer of the rank from which it was forked."""


class DivergenceError(SparseAllreduceError, ArithmeticError):
    """In training, a weight or the loss is no longer a finite number."""


class DatasetError(SparseAllreduceError, ValueError):
    """A data file cannot be read, breaks its format, or holds what the model cannot learn from.

    Attributes
    ----------
    at_command_line : str or None
        The text as a command prints it, if it names an option; None if it is that of the error.
    """

    at_command_line: str | None = None


class CheckpointError(SparseAllreduceError, ValueError):
    """A checkpoint cannot be written or read, is damaged, or is of another run."""


class TrainingStopped(SparseAllreduceError, RuntimeError):
    """Training has been asked to stop before its end, and has done so after a whole step."""
