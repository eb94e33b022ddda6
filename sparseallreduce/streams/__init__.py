"""Sparse streams: the value that every algorithm passes around, and all that is done to one in memory."""
