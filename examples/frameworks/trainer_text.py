"""Train a small language model by the Trainer of Hugging Face's Transformers; --reducer oktopk replaces its dense sums by sparse ones.

mpiexec -n 2 python -m sparseallreduce.torch.run examples/frameworks/trainer_text.py --reducer oktopk
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--reducer")
arguments = parser.parse_args()

LENGTH = 64
text = "\n".join(topics[name] for name in sorted(topics))
tokens = torch.tensor(list(text.encode()))
pieces = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
set_seed(0)
order = torch.randperm(len(pieces))
train, test = [[{"input_ids": pieces[i], "labels": pieces[i]} for i in part] for part in (order[100:], order[:100])]
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))


class SparseSums(TrainerCallback):
    """Replaces the sums of the model that the trainer has wrapped."""

    def on_train_begin(self, *_, **__):
        from sparseallreduce.torch import comm_hook

        if trainer.args.world_size > 1:
            trainer.model_wrapped.register_comm_hook(None, comm_hook(arguments.reducer, density=0.2))


with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            use_cpu=True,
            ddp_backend="gloo",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=train,
        eval_dataset=test,
        callbacks=[SparseSums()] if arguments.reducer else [],
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"test loss {loss:.6f} of {trainer.args.world_size} ranks")
