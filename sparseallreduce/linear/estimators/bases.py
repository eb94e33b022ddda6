"""The base classes of scikit-learn, with the types that it does not declare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["BaseEstimator", "ClassifierMixin", "RegressorMixin"]

if TYPE_CHECKING:
    from typing import Self

    class BaseEstimator:
        """A stand-in for type checkers: the methods of scikit-learn's ``BaseEstimator`` that users of an estimator call."""

        def get_params(self, deep: bool = True) -> dict[str, Any]: ...
        def set_params(self, **params: Any) -> Self: ...
        def __getstate__(self) -> dict[str, Any]: ...
        def __setstate__(self, state: dict[str, Any]) -> None: ...
        def __sklearn_tags__(self) -> Any: ...

    class ClassifierMixin:
        """A stand-in for type checkers: the methods of scikit-learn's ``ClassifierMixin``."""

        def score(self, X: Any, y: Any, sample_weight: Any = None) -> float: ...
        def __sklearn_tags__(self) -> Any: ...

    class RegressorMixin:
        """A stand-in for type checkers: the methods of scikit-learn's ``RegressorMixin``."""

        def score(self, X: Any, y: Any, sample_weight: Any = None) -> float: ...
        def __sklearn_tags__(self) -> Any: ...
else:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
