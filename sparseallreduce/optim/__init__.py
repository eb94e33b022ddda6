"""Stochastic gradient descent with sparsified sums: the optimisers of the papers, for parameters of any framework.

>>> import numpy as np
>>> import sparseallreduce as sar
>>> from sparseallreduce.optim import OkTopkSGD
>>> layers = [np.ones((20, 10), np.float32), np.zeros(20, np.float32)]
>>> optimizer = OkTopkSGD(layers, learning_rate=0.1, density=0.05, comm=sar.SERIAL, momentum=0.9)
>>> updates = optimizer.step([np.full((20, 10), 2, np.float32), np.ones(20, np.float32)])
"""

from sparseallreduce.optim.local_steps import LocalSteps
from sparseallreduce.optim.local_variants import DiLoCo, LocalSGD, SparseLoCo
from sparseallreduce.optim.optimizer import Optimizer
from sparseallreduce.optim.rules import Adam
from sparseallreduce.optim.simulated import simulated_local_step, simulated_step
from sparseallreduce.optim.variants import (
    ApproximateTopKSGD,
    AutoSGD,
    DenseSGD,
    GTopkSGD,
    HiTopKSGD,
    MSTopKSGD,
    OkTopkSGD,
    TopKSGD,
)
from sparseallreduce.optim.warmup import DensityWarmup

__all__ = [
    "Adam",
    "ApproximateTopKSGD",
    "AutoSGD",
    "DenseSGD",
    "DensityWarmup",
    "DiLoCo",
    "GTopkSGD",
    "HiTopKSGD",
    "LocalSGD",
    "LocalSteps",
    "MSTopKSGD",
    "OkTopkSGD",
    "Optimizer",
    "SparseLoCo",
    "TopKSGD",
    "simulated_local_step",
    "simulated_step",
]
