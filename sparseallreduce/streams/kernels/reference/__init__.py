"""The kernels in plain NumPy, for any operator and dtype; they are also the reference for tests of the compiled ones.

Names and results, bitwise, are those of :mod:`sparseallreduce.streams.kernels`, which documents them; modules are named like the compiled
ones. Arguments are also the same, and invalid ones raise an error. The exceptions are
:mod:`~sparseallreduce.streams.kernels.reference.rows`, whose functions have the arguments and special return values
(:mod:`~sparseallreduce.streams.kernels.contract`) of the compiled kernels, and :mod:`~sparseallreduce.streams.kernels.reference.selection`,
which leaves the checks to its callers like the compiled kernels.
"""

from sparseallreduce.streams.kernels.reference.arrays import combine, places
from sparseallreduce.streams.kernels.reference.bitmap import decode_bitmap, decode_nonzero, encode_bitmap, encode_nonzero
from sparseallreduce.streams.kernels.reference.dense import gather_present, scatter, scatter_set
from sparseallreduce.streams.kernels.reference.gaps import decode_gaps, encode_gaps
from sparseallreduce.streams.kernels.reference.merging import merge, shared
from sparseallreduce.streams.kernels.reference.nans import any_above
from sparseallreduce.streams.kernels.reference.order import first_violation, sum_duplicates
from sparseallreduce.streams.kernels.reference.quantisation import from_two_levels, narrow, quantise, restore, to_two_levels, widen
from sparseallreduce.streams.kernels.reference.rows import cut_rows, estimate_union, sum_cut_rows, sum_rows, write_past

__all__ = [
    "any_above",
    "combine",
    "cut_rows",
    "decode_bitmap",
    "decode_gaps",
    "decode_nonzero",
    "encode_bitmap",
    "encode_gaps",
    "encode_nonzero",
    "estimate_union",
    "first_violation",
    "from_two_levels",
    "gather_present",
    "merge",
    "narrow",
    "places",
    "quantise",
    "restore",
    "scatter",
    "scatter_set",
    "shared",
    "sum_cut_rows",
    "sum_duplicates",
    "sum_rows",
    "to_two_levels",
    "widen",
    "write_past",
]
