"""Train by Lightning; --reducer oktopk replaces the dense sums of its strategy "ddp" by sparse ones.

mpiexec -n 2 python -m sparseallreduce.torch.run examples/frameworks/lightning_digits.py --reducer oktopk
"""

import argparse
import os

import lightning
import torch
from digits import net, samples
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--reducer")
arguments = parser.parse_args()


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, _):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SparseSums(lightning.Callback):
    """Replaces the sums of the model that the strategy has wrapped (its ``ddp_comm_hook`` is for GPUs alone)."""

    def on_train_start(self, trainer, _):
        from sparseallreduce.torch import comm_hook

        trainer.model.register_comm_hook(None, comm_hook(arguments.reducer, density=0.05))


train, test = samples()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_epochs=arguments.epochs,
    callbacks=[SparseSums()] if arguments.reducer else [],
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
)
model = Digits()
trainer.fit(model, DataLoader(train, batch_size=50, shuffle=True))
with torch.no_grad():
    loss = nn.functional.cross_entropy(model.net(test.tensors[0]), test.tensors[1])
if trainer.global_rank == 0:
    print(f"test loss {loss:.6f} of {trainer.world_size} ranks")
