"""The names of metrics, what each is, and which a model has."""

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
    "accuracy": "share of samples classified rightly",
    "balanced_accuracy": "mean over the classes of the share of their samples that are classified rightly",
    "precision_macro": "mean of the classes' precisions",
    "recall_macro": "mean of the classes' recalls",
    "f1_macro": "mean of the classes' F1",
    "precision_weighted": "mean of the classes' precisions, by how often each is",
    "recall_weighted": "mean of the classes' recalls, by how often each is",
    "f1_weighted": "mean of the classes' F1, by how often each is",
    "confusion_matrix": "weights of samples: a row a class, a column a predicted class",
}
_TWO = {
    "precision": "of samples predicted as the second class, the share that are of it",
    "recall": "of samples of the second class, the share predicted as it",
    "f1": "harmonic mean of precision and recall of the second class",
}
_RANKS = {
    "roc_auc": "area under the ROC curve; of several classes, their mean, each against the rest",
    "average_precision": "sum of precisions, each times the increase of the recall; of several classes, their mean",
}
_PROBABILITIES = {
    "log_loss": "mean of -ln p of the own class",
    "brier_score": "mean square of the differences between probabilities and classes",
    "calibration_error": f"expected calibration error: by {BINS} bins of equal width of the highest probability, the mean difference "
    "between that and the accuracy",
}
_TOP = {"top_K_accuracy": "share of samples whose class is among the K of the highest scores, for a number K such as 5"}

#: What each metric is, by its name.
METRICS = _CLASSES | _TWO | _RANKS | _PROBABILITIES | _TOP | _REGRESSION

_MANY = 50  # classes from which on a matrix of them, and areas under a curve for each, are made only when they are asked for
_DEFAULT_TOP = 5


def all_metrics(model: FittedModel) -> list[str]:
    """Return the names of the metrics that a model has: those of its kind.

    Of more than 50 classes the confusion matrix and areas under curves are left out, which have to be asked for. With more than five
    classes, ``top_5_accuracy`` is among them.

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
    """Return these names, checked for a model; those of :func:`all_metrics` for None.

    Raises
    ------
    ValueError
        If there is no such metric, or the model has none such.
    """
    if names is None:
        return all_metrics(model)
    for name in names:
        fault = _fault(model, name)
        if fault:
            raise ValueError(fault)
    return list(dict.fromkeys(names))


def _fault(model: FittedModel, name: str) -> str | None:
    """Why a model has no metric of this name, None if it has."""
    top, classes = TOP.fullmatch(name), len(model.classes)
    if (name not in METRICS and not top) or name == "top_K_accuracy":
        return f"there is no metric {name!r}: take some of {', '.join(METRICS)}, with a number for K"
    if (name in _REGRESSION) == bool(classes):
        return f"the metric {name} is of models of {'numbers' if classes else 'classes'}, and this model has {classes or 'no'} classes"
    if name in _TWO and classes != 2:
        return f"the metric {name} is of two classes, and there are {classes}: take {name}_macro or {name}_weighted"
    if top and classes < 3:
        return f"the metric {name} is of more than two classes: take accuracy"
    if name in _PROBABILITIES and not model.gives_probabilities:
        return f"the metric {name} takes probabilities, which logistic models give, and this model is {model.model!r}"
    return None
