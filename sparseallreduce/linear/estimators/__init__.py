"""Linear models with scikit-learn's interface."""

from sparseallreduce.linear.estimators.classes import LinearRegression, LinearSVM, LogisticRegression
from sparseallreduce.linear.estimators.pickles import find_moved

__all__ = ["LinearRegression", "LinearSVM", "LogisticRegression"]

find_moved()  # here, because every pickle of an estimator begins with its class
