"""Names and descriptions of the metrics, and which of them a model has."""

from __future__ import annotations

from collections.abc import Sequence

from sparseallreduce.linear.metrics.classification import BINS, TOP
from sparseallreduce.linear.model_file import FittedModel

__all__ = ["METRICS", "all_metrics", "chosen_metrics"]

_REGRESSION = {
    "r2": "coefficient of determination R^2",
    "mae": "mean absolute error",
    "mse": "mean squared error",
    "rmse": "square root of the mean squared error",
}
_CLASSES = {
    "accuracy": "fraction of samples that are classified correctly",
    "balanced_accuracy": "mean over the classes of the fraction of their samples that are classified correctly (mean recall)",
    "precision_macro": "mean of the classes' precisions",
    "recall_macro": "mean of the classes' recalls",
    "f1_macro": "mean of the classes' F1",
    "precision_weighted": "mean of the classes' precisions, weighted by class frequency",
    "recall_weighted": "mean of the classes' recalls, weighted by class frequency",
    "f1_weighted": "mean of the classes' F1, weighted by class frequency",
    "confusion_matrix": "number (or total weight) of samples, one row per class, one column per predicted class",
}
_TWO = {
    "precision": "fraction of the samples predicted as the second class that belong to it",
    "recall": "fraction of the samples of the second class that are predicted as it",
    "f1": "harmonic mean of precision and recall of the second class",
}
_RANKS = {
    "roc_auc": "area under the ROC curve; for more than two classes, the mean of the one-versus-rest areas",
    "average_precision": "sum of precisions, each times the increase of recall; for more than two classes, the one-versus-rest mean",
}
_PROBABILITIES = {
    "log_loss": "mean of -ln p, where p is the predicted probability of the true class",
    "brier_score": "mean squared difference between the predicted probabilities and the true class",
    "calibration_error": f"expected calibration error: mean difference between the highest probability and the accuracy, over {BINS} bins "
    "of equal width",
}
_TOP = {"top_K_accuracy": "fraction of samples whose class is among the K highest scores, for a number K such as 5"}

#: Description of each metric by name.
METRICS = _CLASSES | _TWO | _RANKS | _PROBABILITIES | _TOP | _REGRESSION

_MANY = 50  # with more classes, the confusion matrix and the areas under curves are computed only on request
_DEFAULT_TOP = 5


def all_metrics(model: FittedModel) -> list[str]:
    """Return the names of the default metrics of a model.

    With more than 50 classes, the confusion matrix and the areas under curves have to be requested by name. With more than five classes,
    ``top_5_accuracy`` is included.

    Parameters
    ----------
    model : FittedModel
        A classifier or a regression.

    Returns
    -------
    list of str
        In the order in which metrics are printed.

    Examples
    --------
    >>> import numpy as np
    >>> all_metrics(FittedModel("linear", np.zeros(3)))
    ['r2', 'mae', 'mse', 'rmse']
    """
    classes = len(model.classes)
    if not classes:
        return list(_REGRESSION)
    two = list(_TWO) if classes == 2 else []
    names = ["accuracy", "balanced_accuracy", *two, *(name for name in _CLASSES if "_macro" in name or "_weighted" in name)]
    names += [*(_RANKS if classes <= _MANY else []), *(_PROBABILITIES if model.gives_probabilities else [])]
    names += [f"top_{_DEFAULT_TOP}_accuracy"] if classes > _DEFAULT_TOP else []
    return names + (["confusion_matrix"] if classes <= _MANY else [])


def chosen_metrics(model: FittedModel, names: Sequence[str] | None) -> list[str]:
    """Return ``names`` without duplicates, checked for a model, or those of :func:`all_metrics` for None.

    Parameters
    ----------
    model : FittedModel
        The model to evaluate.
    names : sequence of str or None
        Metrics, or "all".

    Returns
    -------
    list of str
        Metrics that :func:`evaluate` accepts.

    Raises
    ------
    ValueError
        If a metric is unknown or not defined for the model.
    """
    if names is None:
        return all_metrics(model)
    for name in names:
        fault = _fault(model, name)
        if fault:
            raise ValueError(fault)
    return list(dict.fromkeys(names))


def _fault(model: FittedModel, name: str) -> str | None:
    """Return the reason why a model does not have the metric ``name``, or None."""
    top, classes = TOP.fullmatch(name), len(model.classes)
    if (name not in METRICS and not top) or name == "top_K_accuracy":
        return f"there is no metric {name!r}: choose from {', '.join(METRICS)}, with a number for K"
    if (name in _REGRESSION) == bool(classes):
        return f"the metric {name} is for {'regression' if classes else 'classification'}, but this model has {classes or 'no'} classes"
    if name in _TWO and classes != 2:
        return f"the metric {name} is for two classes, but there are {classes}: use {name}_macro or {name}_weighted"
    if top and classes < 3:
        return f"the metric {name} is for more than two classes: use accuracy"
    if name in _PROBABILITIES and not model.gives_probabilities:
        return f"the metric {name} needs the probabilities of a logistic model, but this model is {model.model!r}"
    return None
