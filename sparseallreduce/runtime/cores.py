"""The cores of a host on which ranks run: all that any of them may use, bound to one each or let loose on a few of many.

How many the host has says little where a container, ``taskset`` or a job scheduler allows some of them: two ranks on one of two cores
that took themselves for a rank a core took 379 microseconds for a sum of a few entries, where ranks that know it take 57.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["MASK_BYTES", "allowed_cores", "count_cores", "usable_cores"]

MASK_BYTES = 256  # for 2,048 cores; ranks bound to others count as if they could use all


def allowed_cores() -> bytes:
    """The cores that this process may run on, a bit for each; none where the system does not tell."""
    mask = 0
    if hasattr(os, "sched_getaffinity"):
        for core in os.sched_getaffinity(0):
            mask |= 1 << core
    return (mask & ((1 << 8 * MASK_BYTES) - 1)).to_bytes(MASK_BYTES, "little")


def count_cores(allowed: Iterable[bytes]) -> int:
    """The cores that processes of this host, each with its :func:`allowed_cores`, may run on together.

    >>> count_cores([b"\\1", b"\\2", b"\\2"])
    2
    """
    union = 0
    for mask in allowed:
        union |= int.from_bytes(mask, "little")
    return union.bit_count() or os.cpu_count() or 1


def usable_cores() -> int:
    """Cores that this process may run on."""
    return count_cores([allowed_cores()])
