"""Areas under the ROC and the precision-recall curve, exact over the samples of all ranks.

No rank collects the samples of the other ranks: each counts how often its scores occur, and the ranks divide the range of scores among
them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.runtime.objects import exchange, gather

__all__ = ["Areas", "area_under_curve", "areas_under_curves"]

Array = NDArray[Any]

_SAMPLES = 256  # approximate number of scores that each rank contributes to the choice of the ranges
_COUNTED = np.dtype([("score", np.float64), ("count", np.int64)])
_WEIGHED = np.dtype([("score", np.float64), ("positive", np.float64), ("negative", np.float64)])


class Areas(NamedTuple):
    """Areas under two curves; None if an area is undefined."""

    roc_auc: float | None
    average_precision: float | None


def area_under_curve(scores: Array, positive: Array, comm: Any) -> float | None:
    """Return the exact area under the ROC curve: the probability that a positive sample scores higher than a negative one.

    A tie counts one half. Collective. The ranks divide the range of scores among them: each receives the scores in its range from all
    ranks, about as many as it has samples, and counts for each positive score the lower negative ones. The counts are integers, so the
    result does not depend on the distribution of the samples. 2.4 million samples on one rank take 0.35 s.

    Returns
    -------
    float or None
        None if there are no positive or no negative samples, or if a score is not finite.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> area_under_curve(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]), sar.SERIAL)
    0.75
    """
    above, below = _counted(scores[positive]), _counted(scores[~positive])
    positives = int(above["count"].sum())
    different = len(above) + len(below)
    totals = gather(comm, (positives, len(scores) - positives, different, bool(np.isfinite(scores).all())))
    positives, negatives, different = (sum(column) for column in list(zip(*totals, strict=True))[:3])
    if not (positives and negatives and all(finite for *_, finite in totals)):
        return None
    if comm.size > 1:
        cuts = _cuts(above, below, different, comm)
        above, below = (_sorted(exchange(comm, _parts(counted, cuts))) for counted in (above, below))
    reached = np.concatenate([[0], np.cumsum(below["count"])]).astype(np.uint64)  # makes the products below exact up to 2**64
    own = int(reached[-1]), int(above["count"].sum())
    lower = sum(count for count, _ in gather(comm, own)[: comm.rank])  # number of negative scores below this rank's range
    twice = 2 * lower * own[1]
    for side in ("left", "right"):  # the sum of both counts each lower score twice and each equal one once
        twice += int(np.dot(above["count"].astype(np.uint64), reached[np.searchsorted(below["score"], above["score"], side)]))
    return float(sum(gather(comm, twice)) / (2 * positives * negatives))


def areas_under_curves(scores: Array, positive: Array, weights: Array, comm: Any) -> Areas:
    """Return the area under the ROC curve and the average precision of the weighted samples of all ranks. Collective.

    Both equal scikit-learn's ``roc_auc_score`` and ``average_precision_score``; the latter is the sum over distinct scores of the precision
    times the increase of the recall. Samples of weight zero are ignored.

    Parameters
    ----------
    scores : ndarray, shape (samples,)
        Scores of this rank's samples, possibly none.
    positive : ndarray of bool, shape (samples,)
    weights : ndarray of float64, shape (samples,)
        At least 0.
    comm : communicator

    Returns
    -------
    Areas
        ``roc_auc`` is None without positive or without negative samples; ``average_precision`` is 0 without positive ones, as in
        scikit-learn. Both are None if a score is not finite, or all samples have weight zero.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> found = areas_under_curves(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]), np.ones(4), sar.SERIAL)
    >>> found.roc_auc, round(found.average_precision, 4)
    (0.75, 0.8333)
    """
    finite = bool(np.isfinite(scores).all())
    counts = weights > 0
    own = _weighed(scores[counts].astype(np.float64), positive[counts] * weights[counts], ~positive[counts] * weights[counts])
    sums = float(own["positive"].sum()), float(own["negative"].sum())
    totals = list(zip(*gather(comm, (*sums, len(own), finite)), strict=True))
    positives, negatives, different = (sum(column) for column in totals[:3])
    if not all(totals[3]) or not positives + negatives > 0:
        return Areas(None, None)
    if comm.size > 1:
        parts = exchange(comm, _parts(own, _cuts(own, own[:0], different, comm)))
        joined = np.concatenate(parts)
        own = _weighed(joined["score"], joined["positive"], joined["negative"])
    ranks = gather(comm, (float(own["positive"].sum()), float(own["negative"].sum())))
    below = sum(negative for _, negative in ranks[: comm.rank])
    higher = [sum(column) for column in zip((0.0, 0.0), *ranks[comm.rank + 1 :])]
    wins = np.dot(own["positive"], below + np.cumsum(own["negative"]) - own["negative"] / 2)
    true, false = (higher[column] + np.cumsum(own[name][::-1])[::-1] for column, name in enumerate(("positive", "negative")))
    shares = gather(comm, (float(wins), float(np.dot(own["positive"], true / (true + false)))))
    wins, precisions = (sum(column) for column in zip(*shares))
    return Areas(wins / positives / negatives if positives and negatives else None, precisions / positives if positives else 0.0)


def _weighed(scores: Array, positive: Array, negative: Array) -> Array:
    """Return the distinct scores in ascending order, with the weight of positive and negative samples at each."""
    found, places = np.unique(scores, return_inverse=True)
    weighed = np.empty(len(found), _WEIGHED)
    weighed["score"] = found
    for name, weights in (("positive", positive), ("negative", negative)):
        weighed[name] = np.bincount(places, weights, len(found))
    return weighed


def _counted(scores: Array) -> Array:
    """Return the distinct scores in ascending order, and how often each occurs."""
    found, counts = np.unique(scores, return_counts=True)
    counted = np.empty(len(found), _COUNTED)
    counted["score"], counted["count"] = found, counts
    return counted


def _cuts(above: Array, below: Array, different: int, comm: Any) -> Array:
    """Return the boundaries that divide the distinct scores of all ranks into ranges of about equal count. Collective."""
    every = max(1, different // (_SAMPLES * comm.size))
    sample = np.sort(np.concatenate(gather(comm, np.concatenate([above["score"][::every], below["score"][::every]]))))
    cuts: Array = sample[len(sample) * np.arange(1, comm.size) // comm.size]
    return cuts


def _parts(counted: Array, cuts: Array) -> list[Array]:
    """Return this rank's scores divided by destination rank."""
    return np.split(counted, np.searchsorted(counted["score"], cuts))


def _sorted(parts: list[Array]) -> Array:
    """Return the scores of all parts in ascending order, possibly with duplicates."""
    joined = np.concatenate(parts)
    return joined[np.argsort(joined["score"], kind="stable")]
