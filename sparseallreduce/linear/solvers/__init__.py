"""Solvers in rounds: what is not mini-batch SGD. Ranks work on their own samples for a whole pass, and then sum what has changed."""

from sparseallreduce.linear.solvers.cocoa import CoCoA, Round
from sparseallreduce.linear.solvers.newton import Newton
from sparseallreduce.linear.solvers.rounds import Figures, RoundOptions, RoundTrainer
from sparseallreduce.linear.solvers.truncated_newton import TruncatedNewton

__all__ = ["CoCoA", "Figures", "Newton", "Round", "RoundOptions", "RoundTrainer", "TruncatedNewton"]
