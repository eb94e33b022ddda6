"""What a channel is.

It is PREPARING until all ranks have what they need. SETTLING: that has failed, by whose fault is to be heard. FAILED: the next operation
begins to prepare it again. FREED: the user has freed the communicator, or it belongs to the rank from which this process was forked.
"""

__all__ = ["FAILED", "FREED", "PREPARING", "READY", "SETTLING"]

PREPARING, SETTLING, READY, FAILED, FREED = range(5)
