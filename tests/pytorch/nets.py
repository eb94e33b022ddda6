"""Small networks, and gradients for them that are made from seeds: of any layout, dtype and rank."""

import torch
from torch import nn

from sparseallreduce import torch as ours

LOSSY = [getattr(ours, name) for name in ("OkTopkSGD", "GTopkSGD", "TopKSGD", "ApproximateTopKSGD", "MSTopKSGD", "HiTopKSGD")]
ALL = [*LOSSY, ours.DenseSGD]


def net(seed=0, dtype=torch.float32):
    """A convolution, a normalisation, and two linear layers."""
    torch.manual_seed(seed)
    images = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*images, nn.Linear(8 * 16, 20), nn.ReLU(), nn.Linear(20, 5)).to(dtype)


def batch(*seed, samples=8, dtype=torch.float32):
    """Images and classes."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    images = torch.randn(samples, 3, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, 5, (samples,), generator=generator)


def backward(model, *seed):
    """The gradient of a batch's mean loss."""
    images, classes = batch(*seed, dtype=next(model.parameters()).dtype)
    loss = nn.functional.cross_entropy(model(images), classes)
    loss.backward()
    return loss


def flat(model):
    """All parameters behind each other, in double precision."""
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in parameters_of(model)])


def flat_gradient(model):
    """Likewise their gradients, zero where there is none."""
    grads = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters_of(model)]
    return torch.cat([grad.to_dense().double().reshape(-1) for grad in grads])


def parameters_of(model):
    return list(model.parameters() if isinstance(model, nn.Module) else model)


def bits(model):
    """What has to be the same on all ranks."""
    return b"".join(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for parameter in parameters_of(model))


def assert_alike(comm, model):
    assert len(set(comm.allgather(bits(model)))) == 1, "replicas have drifted apart"


def mean_over(comm, tensor):
    """The mean of the ranks' tensors, in double precision."""
    return sum(comm.allgather(tensor.double())) / comm.size
