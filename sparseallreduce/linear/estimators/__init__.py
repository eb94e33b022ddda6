"""Linear models with scikit-learn's interface."""

from sparseallreduce.linear.estimators.classes import LinearRegression, LinearSVM, LogisticRegression
from sparseallreduce.linear.estimators.pickles import find_moved

__all__ = ["LinearRegression", "LinearSVM", "LogisticRegression"]

find_moved()  # here, because loading a pickle of an estimator imports this package first
