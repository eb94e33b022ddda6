"""Parameter servers: the model is stored on separate ranks (thesis section 4.2.2)."""

from sparseallreduce.linear.strategies.parameter_server.strategy import (
    AsynchronousParameterServer,
    ParameterServer,
    SynchronousParameterServer,
    read_on_workers,
)

__all__ = ["AsynchronousParameterServer", "ParameterServer", "SynchronousParameterServer", "read_on_workers"]
