"""Train a small convolution net in PyTorch on images of digits, by two ranks that send 1 % of their gradients.

mpiexec -n 2 python examples/torch_digits.py                              (or without mpiexec, on one process)
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sparseallreduce as sar
from sparseallreduce.torch import OkTopkSGD

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--density", type=float, default=0.01)
arguments = parser.parse_args()
torch.set_num_threads(1)  # the ranks of a machine share its cores

pixels, labels = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same on all ranks
train, test = order[:1500], order[1500:]

model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    *(nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
)
optimizer = OkTopkSGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4, density=arguments.density)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
ranks, rank = optimizer.comm.size, optimizer.comm.rank
samples = TensorDataset(images[train], labels[train])
sampler = DistributedSampler(samples, ranks, rank)
loader = DataLoader(samples, batch_size=50 // ranks, sampler=sampler)

with sar.trace() as traffic:
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()

optimizer.check_replicas()
model.eval()
with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
if rank == 0:
    size = sum(parameter.numel() for parameter in model.parameters())
    dense = 2 * 4 * size * (ranks - 1) / ranks * optimizer.steps
    sent = f"{traffic.bytes_sent / 1e6:.1f} MB sent by a rank, dense sums {dense / 1e6:.0f} MB"
    print(f"{ranks} ranks: test accuracy {accuracy:.3f} after {optimizer.steps} steps of {size:,} parameters; {sent}")
