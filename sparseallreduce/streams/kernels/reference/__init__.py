"""The kernels in plain NumPy: any operator, any value dtype; the second opinion on the compiled ones.

Names and results, bit for bit, are those of :mod:`sparseallreduce.streams.kernels`, which documents them; the modules have the names of
those that are compiled. Arguments are those of its functions too, and what does not fit raises an error. The exceptions are
:mod:`~sparseallreduce.streams.kernels.reference.rows`, whose functions take the place of the compiled ones, and therefore their arguments,
and return the numbers of :mod:`~sparseallreduce.streams.kernels.contract`, and
:mod:`~sparseallreduce.streams.kernels.reference.selection`, which leaves what does not fit to its callers as they do.
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
