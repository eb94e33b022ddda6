"""Metrics of models over the samples of all ranks, equal to scikit-learn's: :func:`evaluate`, and :data:`METRICS` by name."""

from sparseallreduce.linear.metrics.api import evaluate, evaluate_scores, rows_of, scores_of, target_of
from sparseallreduce.linear.metrics.classification import TOP
from sparseallreduce.linear.metrics.names import METRICS, all_metrics, chosen_metrics

__all__ = ["METRICS", "TOP", "all_metrics", "chosen_metrics", "evaluate", "evaluate_scores", "rows_of", "scores_of", "target_of"]
