"""Sparse streams, the data type of every algorithm, and all local operations on them."""
