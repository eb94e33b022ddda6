"""Checks for algorithms, reducers and codecs from outside the library, in the spirit of scikit-learn's ``check_estimator``.

Each raises CheckFailure with the first, small example that breaks a promise of the library, and returns a report otherwise. They need
neither MPI nor a test framework: all ranks run in the simulator.
"""

from sparseallreduce.testing.algorithms import check_algorithm
from sparseallreduce.testing.codecs import check_codec
from sparseallreduce.testing.reducers import check_reducer
from sparseallreduce.testing.report import CheckFailure, Report

__all__ = ["CheckFailure", "Report", "check_algorithm", "check_codec", "check_reducer"]
