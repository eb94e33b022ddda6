"""All exceptions of the library.

Each class stands for one kind of mistake, and also derives from a built-in class, so that callers who do not know this library catch what
they expect (``ValueError`` for a bad stream, ``TypeError`` for a wrong type, ...).
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
        Whether every rank of the operation raises the same error.
    """

    on_all_ranks = False


class StreamError(SparseAllreduceError, ValueError):
    """Raised if the contents of a stream violate its invariants: order, range, shape or length."""


class StreamTypeError(SparseAllreduceError, TypeError):
    """Raised if an argument is not a stream, or has a dtype that streams do not support."""


class AlgorithmError(SparseAllreduceError, ValueError):
    """Raised if the name of an algorithm or operator, or one of its options, is unknown or out of range."""


class MismatchError(SparseAllreduceError, ValueError):
    """Raised if the ranks of an operation disagree on dimension, dtype, width, operator, algorithm or options."""


class WireError(SparseAllreduceError, ValueError):
    """Raised if a message is not a valid stream: it is truncated, altered, not of this library, or of another version."""


class DeadlockError(SparseAllreduceError, RuntimeError):
    """Raised by the simulator when every unfinished rank waits for a message that no rank will send."""


class WaitTimeoutError(SparseAllreduceError, TimeoutError):
    """Raised on all ranks if an operation was not done within the timeout of a rank."""


class MPIUnavailableError(SparseAllreduceError, ImportError):
    """Raised if mpi4py or its MPI library cannot be loaded."""


class LauncherError(SparseAllreduceError, RuntimeError):
    """Raised if a launcher has started several processes but MPI connects only one, so that nothing would be reduced."""


class ForkError(SparseAllreduceError, RuntimeError):
    """Raised if a process uses a communicator, request, plan or reducer of the rank from which it was forked."""


class DivergenceError(SparseAllreduceError, ArithmeticError):
    """Raised in training if a weight or the loss is no longer finite."""


class DatasetError(SparseAllreduceError, ValueError):
    """Raised if a data file cannot be read, violates its format, or contains data that the model cannot learn from.

    Attributes
    ----------
    at_command_line : str or None
        The text that a command prints, if it names an option; None if it is the text of the error.
    """

    at_command_line: str | None = None


class CheckpointError(SparseAllreduceError, ValueError):
    """Raised if a checkpoint cannot be written or read, is damaged, or belongs to another run."""


class TrainingStopped(SparseAllreduceError, RuntimeError):
    """Raised when training stops early on request, after a complete step."""
