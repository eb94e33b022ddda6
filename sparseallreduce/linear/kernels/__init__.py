"""Loops over non-zeros for training, compiled by numba: scores, gradient of a batch, update of the weights.

A batch touches few of the N features, in any order and many of them often. Its rows are copied to one place and their features renumbered.
A bitmap records which of the N features occur, one bit per feature, and a second bitmap records which words of the first have bits set.
Reading the bitmap in order gives the features sorted, without sorting and without a pass over N entries, and the number of set bits before
each word, from which a feature's new number follows. Weights and sums in the new numbering are arrays with one entry per feature of the
batch, which stay in the cache, unlike arrays of N entries. For large batches they exceed the cache too: these are processed in bands of
features, all rows for one band before the next. The values of long rows are read in place; if a batch of long rows touches a large fraction
of all features, so are the rows themselves, see :mod:`.bands`.

Rows of a shuffled batch lie anywhere in memory, and so do the weights of a row, where the hardware cannot predict the next access. So a
later row is prefetched while a row is processed, and so are the weights of the indices some entries ahead. Arrays that fit the cache are
not prefetched, because a prefetch takes as long as an access.

Measured with two ranks on two cores, in nanoseconds per non-zero in the steps of a training, at N = 3.2 million and 1,000 rows of 116
non-zeros: copying and marking 3.6, of which 2.1 for reading the rows at all, sorted features 1.0, weights of the features 1.1,
renumbering 0.8, scores 0.7, sums 0.8, finding rows and clearing marks 0.3, and 2.1 for the update by the sum of both ranks; in addition
1.3 in the interpreter and 0.9 for the order of the samples. At N = 16.6 million and 1,000 rows of 3,730: 2.9 for copying and marking,
then 0.9, 1.5, 1.2, 1.7, 1.7, 0.2 and 1.6. Marking in pieces has since reduced copying and marking to 0.86 of the time, and computing the
order of the samples to 0.3. With that and shared weights, of which each rank updates half, at N = 3.2 million: 4.7 for all that
:func:`compact` does, 1.4 for the weights, 0.7 for the scores, 0.7 for the sums, 1.1 for the update, 0.1 for finding rows, 0.1 waiting
and 0.9 in the interpreter; with other processes using the memory: 9.3, 2.9, 1.1, 1.1, 3.4, 0.2, 0.3 and 2.5. For rows of 3,730 non-zeros,
copying and marking take 1.6 instead of 2.3 because their values are not copied; for rows of 116, not copying makes gradient and update take
1.15 times as long. Writing four positions of a word per iteration takes 0.6 for sorted features, writing two takes 0.8.
"""

from sparseallreduce.linear.kernels.bands import ROOM, collect, width_in_place
from sparseallreduce.linear.kernels.columns import (
    accumulate_columns,
    column_scores,
    compact_accumulate_columns,
    compact_column_scores,
    descend_columns,
    gather_columns,
    warm_up_columns,
)
from sparseallreduce.linear.kernels.compacting import bitmap, compact, marked, move_marks, renumber, take_rows, unmark
from sparseallreduce.linear.kernels.dealing import deal
from sparseallreduce.linear.kernels.fingerprints import fingerprint
from sparseallreduce.linear.kernels.gradients import accumulate, compact_accumulate
from sparseallreduce.linear.kernels.rows import extents
from sparseallreduce.linear.kernels.scores import compact_scores, scores
from sparseallreduce.linear.kernels.updates import descend, descend_dense, gather
from sparseallreduce.linear.kernels.warming import warm_up

__all__ = [
    "ROOM",
    "accumulate",
    "accumulate_columns",
    "bitmap",
    "collect",
    "column_scores",
    "compact",
    "compact_accumulate",
    "compact_accumulate_columns",
    "compact_column_scores",
    "compact_scores",
    "deal",
    "descend",
    "descend_columns",
    "descend_dense",
    "extents",
    "fingerprint",
    "gather",
    "gather_columns",
    "marked",
    "move_marks",
    "renumber",
    "scores",
    "take_rows",
    "unmark",
    "warm_up",
    "warm_up_columns",
    "width_in_place",
]
