"""The communicator of a single process that runs without MPI."""

from __future__ import annotations

__all__ = ["SERIAL", "SerialCommunicator"]


class SerialCommunicator:
    """A communicator of one rank that needs no MPI library.

    Examples
    --------
    >>> SERIAL.rank, SERIAL.size
    (0, 1)
    """

    rank = 0
    size = 1

    def Get_rank(self) -> int:
        """Return 0."""
        return self.rank

    def Get_size(self) -> int:
        """Return 1."""
        return self.size

    def __reduce__(self) -> str:
        return "SERIAL"  # copies and pickles return this same object

    def __repr__(self) -> str:
        return "sparseallreduce.SERIAL"


SERIAL = SerialCommunicator()
