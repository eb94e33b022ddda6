"""Selectors: they choose the values of a vector that are worth sending.

All have one interface: they take an accumulator and return a stream. With a gradient, the accumulator (then a residual) is first increased
by it, in the same pass if the selector can; with ``clear``, selected values are set to zero in the accumulator, which so becomes the
residual of what was sent.

Magnitudes are ordered with NaN above infinity, and all NaNs equal: non-finite values are selected first, are seen by all ranks, and do not
stay in a residual. Among equal magnitudes the one with the lower index comes first.
"""

from sparseallreduce.streams.selection.approximate import ApproximateTopK
from sparseallreduce.streams.selection.base import Selector
from sparseallreduce.streams.selection.chunked import ChunkTopK
from sparseallreduce.streams.selection.exact import ExactTopK, kth_magnitude, top_of_stream
from sparseallreduce.streams.selection.gaussian import Gaussian
from sparseallreduce.streams.selection.mstopk import MSTopK
from sparseallreduce.streams.selection.nonzero import NonZeroTopK
from sparseallreduce.streams.selection.randomk import RandomK
from sparseallreduce.streams.selection.reuse import Reuse, ThresholdReuse, choose_reusing, choose_with_copy
from sparseallreduce.streams.selection.sampling import DoubleSampling
from sparseallreduce.streams.selection.threshold import Threshold, select_at_least, stream_at_least

__all__ = [
    "ApproximateTopK",
    "ChunkTopK",
    "DoubleSampling",
    "ExactTopK",
    "Gaussian",
    "MSTopK",
    "NonZeroTopK",
    "RandomK",
    "Reuse",
    "Selector",
    "Threshold",
    "ThresholdReuse",
    "choose_reusing",
    "choose_with_copy",
    "kth_magnitude",
    "select_at_least",
    "stream_at_least",
    "top_of_stream",
]
