"""Solvers in rounds, as opposed to mini-batch SGD: ranks process their own samples for a whole pass, and then sum the changes."""

from sparseallreduce.linear.solvers.cocoa import CoCoA, Round
from sparseallreduce.linear.solvers.newton import Newton
from sparseallreduce.linear.solvers.rounds import Figures, RoundOptions, RoundTrainer
from sparseallreduce.linear.solvers.truncated_newton import TruncatedNewton

__all__ = ["CoCoA", "Figures", "Newton", "Round", "RoundOptions", "RoundTrainer", "TruncatedNewton"]
