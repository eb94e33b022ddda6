"""The states of a channel.

PREPARING: the ranks set it up. READY: operations can start. SETTLING: the setup has failed, and the ranks agree on the error. FAILED: the
next operation sets it up again. FREED: the user has freed the communicator, or it belongs to the rank from which this process was forked.
"""

__all__ = ["FAILED", "FREED", "PREPARING", "READY", "SETTLING"]

PREPARING, SETTLING, READY, FAILED, FREED = range(5)
