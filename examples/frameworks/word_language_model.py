"""Train an LSTM as PyTorch's example of a word language model does; --reducer oktopk replaces its dense sums by sparse ones.

mpiexec -n 2 python -m sparseallreduce.torch.run examples/frameworks/word_language_model.py --reducer oktopk
torchrun --nproc-per-node 2 examples/frameworks/word_language_model.py
"""

import argparse
import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--reducer")
arguments = parser.parse_args()

LENGTH, COLUMNS, WORDS = 16, 16, 2000  # words of a step, texts a rank reads side by side, words in the vocabulary


class Model(nn.Module):
    """An embedding, an LSTM of two layers and a decoder, with dropout between them."""

    def __init__(self, words, width):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(words, width), nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.2)
        self.decoder = nn.Linear(width, words)

    def forward(self, text, state=None):
        out, state = self.lstm(self.dropout(self.embedding(text)), state)
        return self.decoder(self.dropout(out)), state


def loss_of(scores, following):
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(rank)  # dropout; the weights are those of rank 0
words = [word for name in sorted(topics) for word in re.findall(r"\w+|[^\w\s]", topics[name])]
numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(WORDS - 1), 1)}  # 0: all others
codes = torch.tensor([numbers.get(word, 0) for word in words])
test, train = codes[:5000].view(1, -1).t(), codes[5000:]
train = train[: len(train) // (COLUMNS * ranks) * COLUMNS * ranks].view(COLUMNS * ranks, -1).t()[:, rank::ranks].contiguous()

model: nn.Module = DistributedDataParallel(Model(WORDS, 64))
if arguments.reducer:
    from sparseallreduce.torch import comm_hook

    model.register_comm_hook(None, comm_hook(arguments.reducer, density=0.05))
optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
state = None
for step in range(arguments.steps):
    start = step * LENGTH % (len(train) - LENGTH - 1)
    text, following = train[start : start + LENGTH], train[start + 1 : start + LENGTH + 1]
    optimizer.zero_grad()
    scores, state = model(text, state)
    loss_of(scores, following).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    scheduler.step()
    state = tuple(each.detach() for each in state)
model.eval()
with torch.no_grad():
    loss = loss_of(model(test[:-1])[0], test[1:])
if rank == 0:
    print(f"test loss {loss:.6f} of {ranks} ranks")
distributed.destroy_process_group()
