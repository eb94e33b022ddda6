"""Train with DistributedDataParallel, as scripts for torchrun do; --reducer oktopk replaces its dense sums by sparse ones.

mpiexec -n 2 python -m sparseallreduce.torch.run examples/frameworks/ddp_digits.py --reducer oktopk
torchrun --nproc-per-node 2 examples/frameworks/ddp_digits.py
"""

import argparse

import torch
from digits import net, samples
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--reducer")
arguments = parser.parse_args()

distributed.init_process_group("gloo")
train, test = samples()
model = DistributedDataParallel(net())
if arguments.reducer:
    from sparseallreduce.torch import comm_hook

    model.register_comm_hook(None, comm_hook(arguments.reducer, density=0.05))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(train)
for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for images, labels in DataLoader(train, batch_size=50, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(test.tensors[0]), test.tensors[1])
if distributed.get_rank() == 0:
    print(f"test loss {loss:.6f} of {distributed.get_world_size()} ranks")
distributed.destroy_process_group()
