"""A communicator of one rank, for a process without MPI."""

from __future__ import annotations

__all__ = ["SERIAL", "SerialCommunicator"]


class SerialCommunicator:
    """One rank, alone; what the library and its trainer ask of a communicator, with nobody to talk to.

    Examples
    --------
    >>> SERIAL.rank, SERIAL.size
    (0, 1)
    """

    rank = 0
    size = 1

    def Get_rank(self) -> int:
        """Always 0."""
        return self.rank

    def Get_size(self) -> int:
        """Always 1."""
        return self.size

    def __reduce__(self) -> str:
        return "SERIAL"  # copies and pickles of it are it

    def __repr__(self) -> str:
        return "sparseallreduce.SERIAL"


SERIAL = SerialCommunicator()
