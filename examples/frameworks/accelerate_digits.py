"""Train by Hugging Face's Accelerate; --reducer oktopk replaces the dense sums of the prepared model by sparse ones.

mpiexec -n 2 python -m sparseallreduce.torch.run examples/frameworks/accelerate_digits.py --reducer oktopk
"""

import argparse

import torch
from accelerate import Accelerator
from digits import net, samples
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--reducer")
arguments = parser.parse_args()

accelerator = Accelerator(cpu=True)
train, test = samples()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(train, batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(0))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if arguments.reducer and accelerator.num_processes > 1:
    from sparseallreduce.torch import comm_hook

    model.register_comm_hook(None, comm_hook(arguments.reducer, density=0.05))
for _ in range(arguments.epochs):
    for images, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(test.tensors[0]), test.tensors[1])
if accelerator.is_main_process:
    print(f"test loss {loss:.6f} of {accelerator.num_processes} ranks")
accelerator.end_training()
