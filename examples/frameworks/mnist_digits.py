"""Train a small convolutional net as PyTorch's example of MNIST; --reducer oktopk replaces its dense sums by sparse ones.

mpiexec -n 2 python -m sparseallreduce.torch.run examples/frameworks/mnist_digits.py --reducer oktopk
torchrun --nproc-per-node 2 examples/frameworks/mnist_digits.py
"""

import argparse

import torch
from digits import samples
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--reducer")
arguments = parser.parse_args()

distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())  # dropout; the weights are those of rank 0
model: nn.Module = nn.Sequential(
    nn.Unflatten(1, (1, 8, 8)),
    *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
    *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
    *(nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1)),
)
model = DistributedDataParallel(model)
if arguments.reducer:
    from sparseallreduce.torch import comm_hook

    model.register_comm_hook(None, comm_hook(arguments.reducer, density=0.05))
train, test = samples()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
sampler = DistributedSampler(train)
for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for images, labels in DataLoader(train, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.nll_loss(model(images), labels).backward()
        optimizer.step()
    scheduler.step()
model.eval()
with torch.no_grad():
    loss = nn.functional.nll_loss(model(test.tensors[0]), test.tensors[1])
if distributed.get_rank() == 0:
    print(f"test loss {loss:.6f} of {distributed.get_world_size()} ranks")
distributed.destroy_process_group()
