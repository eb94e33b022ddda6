"""Distributed training with PyTorch: optimisers that sum sparse gradients over MPI. Needs the extra ``torch``.

>>> import torch, sparseallreduce as sar
>>> from sparseallreduce.torch import OkTopkSGD
>>> model = torch.nn.Linear(20, 10)
>>> optimizer = OkTopkSGD(model.parameters(), lr=0.1, density=0.05, comm=sar.SERIAL)      # under mpiexec without comm
>>> model(torch.ones(20)).square().sum().backward()
>>> optimizer.step()
"""

from sparseallreduce.torch.cached import CachedDataset
from sparseallreduce.torch.ddp import CommHook, comm_hook
from sparseallreduce.torch.flat_states import flatten_state, unflatten_state
from sparseallreduce.torch.layerwise import LAMB, LARS
from sparseallreduce.torch.local_steps import DiLoCo, LocalSGD, LocalSteps, SparseLoCo
from sparseallreduce.torch.optimizer import DistributedOptimizer
from sparseallreduce.torch.optimizers import (
    ApproximateTopKSGD,
    AutoSGD,
    DenseSGD,
    GTopkSGD,
    HiTopKSGD,
    MSTopKSGD,
    OkTopkSGD,
    TopKSGD,
    distributed,
)
from sparseallreduce.torch.parallel import parallel_map, parallel_operator
from sparseallreduce.torch.process_group import init_process_group
from sparseallreduce.torch.rowwise import RowwiseAdagrad
from sparseallreduce.torch.sampler import HostSampler

__all__ = [
    "LAMB",
    "LARS",
    "ApproximateTopKSGD",
    "AutoSGD",
    "CachedDataset",
    "CommHook",
    "DenseSGD",
    "DiLoCo",
    "DistributedOptimizer",
    "GTopkSGD",
    "HiTopKSGD",
    "HostSampler",
    "LocalSGD",
    "LocalSteps",
    "MSTopKSGD",
    "OkTopkSGD",
    "RowwiseAdagrad",
    "SparseLoCo",
    "TopKSGD",
    "comm_hook",
    "distributed",
    "flatten_state",
    "init_process_group",
    "parallel_map",
    "parallel_operator",
    "unflatten_state",
]
