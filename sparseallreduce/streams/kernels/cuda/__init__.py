"""The kernels as CUDA: device arrays in, device arrays out, and the array module, CuPy or under numba's simulator NumPy, as a parameter.

Results are those of :mod:`sparseallreduce.streams.kernels` and :mod:`sparseallreduce.streams.selection`, bit for bit, except that a GPU
has one NaN where processors pass on the bits of an operand. Whatever makes a result of unknown length counts, takes the prefix sums of
the counts, and places: no block waits for another, every element of an output has one thread that writes it, and the only atomic
operations count integers. Of values, and where a place comes from an index, every kernel compares with the length before it writes.

Positions are ``int64`` and indices, once anything is computed with them, ``uint64``: numba makes a float of the two together.
This package imports ``numba.cuda``; :mod:`sparseallreduce.streams.kernels.backend` is who loads it.
"""
