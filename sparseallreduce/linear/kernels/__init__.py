"""The loops over non-zeros of the trainer, compiled by numba: scores, gradient of a batch, update of the weights.

A batch touches few of the N features, in any order and many of them often. Its rows are copied to one place and their features
renumbered: a bitmap records which of the N occur, one bit a feature, and one byte a block of 4,096 features that says whether any of
them does. Reading the bitmap in order gives the features sorted, without a sort and without a pass over N entries, and the number of
marks before each of its words, by which a feature's new number is found. Weights and sums in the new numbering are arrays of as many
entries as there are features in the batch, which stay in the cache where arrays of N entries do not. Those of a large batch do not
either: they are gone through in bands of features, each by all rows before the next. The values of long rows are used where they are;
and where a batch of long rows touches a good share of all features, so are the rows themselves, see :mod:`.bands`.

Rows of a shuffled batch lie anywhere in memory, and so do the weights of a row, where no hardware foresees the next one: so while a
row is worked on, a later one is fetched, and what indices refer to some entries ahead. What lies in the cache anyway is not fetched,
since asking for it takes as long as using it.

Measured with two ranks on two cores, in nanoseconds a non-zero in the steps of a training, at N = 3.2 million and 1,000 rows of 116
non-zeros: copying and marking 3.6, of which 2.1 for reading the rows at all, sorted features 1.0, weights of the features 1.1,
renumbering 0.8, scores 0.7, sums 0.8, finding rows and clearing marks 0.3, and 2.1 for the update by the sum of both ranks; besides,
1.3 in the interpreter and 0.9 for the order of the samples. At N = 16.6 million and 1,000 rows of 3,730: 2.9 for copying and marking,
then 0.9, 1.5, 1.2, 1.7, 1.7, 0.2 and 1.6. Since then marks are made in pieces, by which copying and marking take 0.86 of the time, and
the order is computed, in 0.3. With that and a shared replica, each rank makes half of the update, at N = 3.2 million: 4.7 for all that
:func:`compact` does, 1.4 for the weights, 0.7 for the scores, 0.7 for the sums, 1.1 for the update, 0.1 for finding rows, 0.1 waiting
and 0.9 in the interpreter; and when others wanted the memory: 9.3, 2.9, 1.1, 1.1, 3.4, 0.2, 0.3 and 2.5. Of rows of 3,730 non-zeros,
copying and marking take 1.6 instead of 2.3 since their values are not copied; with rows of 116, gradient and update took 1.15 times as
long by that. Four places of a word written at once took 0.6 for sorted features where two took 0.8.
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
