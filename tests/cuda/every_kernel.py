"""Program for compute-sanitizer: every kernel once, on arrays of more than a block, which takes a few seconds without it.

Run as ``SPARSEALLREDUCE_TEST_GPU=1 compute-sanitizer --tool memcheck python tests/cuda/every_kernel.py``; ``make test-gpu`` does. It
compares nothing with the CPU's results, as the tests do.
"""

import os

import numpy as np
from ranks import array_module

from sparseallreduce.linear.kernels.cuda import losses, rows, weights
from sparseallreduce.streams.kernels.cuda import bitmap, dense, drawing, gaps, merging, mstopk, norms, order, partition, ranking, selection
from sparseallreduce.streams.operator import SUM


def run(xp, size):
    rng = np.random.default_rng(0)

    def drawn(share):
        return xp.asarray(np.sort(rng.choice(size, size // share, replace=False)).astype(np.uint32))

    vector, gradient = (xp.asarray(rng.standard_normal(size).astype(np.float32)) for _ in range(2))
    sets = [drawn(share) for share in (3, 4, 5)]
    streams = [(indices, vector[: len(indices)].copy()) for indices in sets]
    merging.merge_many(streams, SUM, xp)
    merging.loosely(merging.loosely(streams[0], streams[1], SUM, xp), streams[2], SUM, xp)
    dense.scatter(*streams[0], 0, SUM, gradient.copy(), xp)
    dense.scatter_set(*streams[0], 0, gradient.copy(), xp)
    dense.clear(sets[0], gradient.copy(), xp)
    dense.gather_present(vector, 0, np.uint32, xp)
    selection.select_at_least(vector.copy(), 1.5, gradient, np.uint32, xp, clear=True)
    key, ties = ranking.kth(vector, size // 9, xp)
    ranking.top(vector, key, ties, size // 9, np.uint32, xp)
    ranking.largest(vector, size // 9, np.uint32, xp)
    ranking.count_interval(vector, key, 20, xp.zeros(1 << 11, np.int64), xp)
    mstopk.mstopk(vector.copy(), gradient, size // 9, np.uint32, xp, clear=True)
    norms.sum_and_largest(vector.copy(), gradient, xp)
    drawing.draw(vector.copy(), gradient, np.uint32, xp, bucket=512, share=0.1, at_most=False, fixed=0, seed=1, clear=True)
    order.first_violation(sets[0], size, xp)
    order.sum_duplicates(sets[0] // np.uint32(2), streams[0][1], SUM, xp)
    marks = order.contained(sets[0], sets[1], xp)
    order.marked(marks, int(xp.count_nonzero(marks)), xp)
    partition.cuts(sets[0], [0, size // 2, size], 0, size, xp)
    bitmap.decode_bitmap(bitmap.encode_bitmap(sets[0], 0, size, xp), 0, size, len(sets[0]), np.dtype(np.uint32), xp)
    bits, values = bitmap.encode_nonzero(vector, xp)
    bitmap.decode_nonzero(bits, values, size, xp)
    far = xp.concatenate([sets[0], xp.asarray(np.array([2**31], np.uint32))])  # a gap that is an exception
    gaps.decode_gaps(gaps.encode_gaps(far, 0, xp), 0, 2**32, len(far), np.dtype(np.uint32), xp)
    run_linear(xp, rng, size)


def run_linear(xp, rng, size):
    """A step of two classes and one of three, on samples of eight entries."""
    samples, free, norms, read = size // 8, xp.zeros(size, np.float32), xp.ones(size, np.float32), xp.asarray(np.array([0.5, 0.01, 0.02]))
    entries = xp.asarray(np.sort(rng.integers(0, size // 3, (samples, 8)), axis=1).reshape(-1).astype(np.uint32))
    values = xp.asarray(rng.standard_normal(8 * samples).astype(np.float32))
    taken = rows.Taken(xp.asarray(np.arange(0, 8 * samples + 1, 8)), entries, values, xp.asarray(rng.permutation(samples)))
    labels, flag = xp.asarray(rng.integers(0, 3, samples).astype(np.float64)), xp.zeros(1, np.float64)
    for classes in (1, 3):
        intercepts = xp.zeros(classes, np.float64)
        scores = rows.scores(taken, free, intercepts, 1.0, xp)
        if classes == 1:
            for loss in losses.SLOPES:
                slopes = losses.coefficients(loss, scores, labels, None, 0, 0.5, 1.0, np.float32, xp)
        else:
            slopes = losses.softmax_coefficients(scores, labels, labels, classes, 1.0, np.float32, xp)
        indices, sums, _ = rows.total(taken, slopes.reshape(-1, classes), np.uint32, size // classes, xp)
        weights.descend(free, indices, sums.reshape(-1), classes, 0.1, 0.1, intercepts, flag, xp)
        given = 0.1, 1.0, (0.01, 0.02), 1.0, intercepts, xp.zeros(classes, np.float64), flag
        weights.descend_adaptively(free, norms, indices, sums.reshape(-1), classes, *given, xp)
        rows.scores(taken, free, intercepts, 1.0, xp, norms=norms, read=read, weight_at=weights.adaptive_weight)
    weights.read_adaptive(free, norms, read, xp)


if __name__ == "__main__":
    run(array_module(), 20_000 if os.environ.get("SPARSEALLREDUCE_TEST_GPU") == "1" else 60)
    print("every kernel has run")
