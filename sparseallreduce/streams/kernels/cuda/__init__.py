"""CUDA kernels for arrays on a device. The array module, CuPy (or NumPy in numba's simulator), is a parameter.

Results are bitwise those of :mod:`sparseallreduce.streams.kernels` and :mod:`sparseallreduce.streams.selection`, except that a GPU has one
NaN, where processors propagate the bits of an operand. Kernels with results of unknown length count, compute the prefix sums of the counts,
and then place: no block waits for another, every output element has one thread that writes it, and the only atomic operations count
integers. A position computed from data is checked against the length before it is written to.

Positions are ``int64``, and indices in computations ``uint64``: numba would convert a mix of the two to float.

This package imports ``numba.cuda``; only :mod:`sparseallreduce.streams.kernels.backend` imports it.
"""
