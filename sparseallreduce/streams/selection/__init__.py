"""Selectors: which values of a vector are worth sending.

All have one interface: an accumulator in, a stream out. With a gradient, the accumulator (a residual then) is first increased by it,
in the same pass where the selector can; with ``clear``, what was chosen is set to zero in the accumulator, which so becomes the
residual of what was sent.

Magnitudes are ordered with NaN above infinity, and every NaN equal to every other: what is not finite is chosen first, is seen by
all ranks, and does not stay behind in a residual. Among equal magnitudes the one with the lower index comes first.
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
