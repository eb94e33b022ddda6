"""Data sets of the LIBSVM collection by name."""
