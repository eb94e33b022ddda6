"""Small networks of the kinds that the papers train: convolutions, residual blocks, dense layers, an LSTM, and a transformer."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["MODELS", "count", "make"]


def make(name: str, classes: int, seed: int = 0, width: int = 32) -> nn.Module:
    """A model of a name in MODELS, with random weights that the seed decides; ``width`` is the unit of its layers."""
    torch.manual_seed(seed)
    model: nn.Module = MODELS[name](classes, width)
    return model


def count(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def vgg(classes: int, width: int) -> nn.Module:
    """Blocks of convolutions of 3 x 3, each half as large and twice as wide as the one before, and two dense layers; like VGG.

    Images have 8 x 8 pixels.
    """
    layers: list[nn.Module] = []
    channels = 1
    for block in (1, 2, 4):
        for _ in range(2):
            layers += [nn.Conv2d(channels, block * width, 3, padding=1, bias=False), nn.BatchNorm2d(block * width), nn.ReLU()]
            channels = block * width
        if block < 4:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(4 * channels, 8 * width), nn.ReLU(), nn.Linear(8 * width, classes)]
    return nn.Sequential(*layers, *head)


class Residual(nn.Module):
    """Two convolutions, whose input is added to their output."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, channels, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.other = nn.Identity() if before == channels else nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x)) + self.other(x))


def resnet(classes: int, width: int) -> nn.Module:
    """Residual blocks, and a mean over the image, like ResNet-20."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for before, channels in ((1, 1), (1, 2), (2, 4)):
        layers.append(Residual(before * width, channels * width, 1 if before == channels else 2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def perceptron(classes: int, width: int) -> nn.Module:
    """Two hidden layers, as in figure 5.16 of the thesis, where they are eight times as wide."""
    hidden = 16 * width
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class LSTM(nn.Module):
    """A character model: the next character after each."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 2 * width)
        self.lstm = nn.LSTM(2 * width, 8 * width, batch_first=True)
        self.head = nn.Linear(8 * width, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(self.embedding(x))
        scores: torch.Tensor = self.head(out)
        return scores


class Block(nn.Module):
    """Attention to what came before, and two dense layers, each behind a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.queries(self.norm(x)).view(samples, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.dense(self.norm_2(x))


class Transformer(nn.Module):
    """A character model of a few blocks."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(characters, 3 * width), nn.Embedding(256, 3 * width)
        self.blocks = nn.Sequential(*(Block(3 * width, 4) for _ in range(3)))
        self.head = nn.Sequential(nn.LayerNorm(3 * width), nn.Linear(3 * width, characters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.blocks(self.embedding(x) + self.places.weight[: x.shape[1]]))
        return scores


MODELS = {"vgg": vgg, "resnet": resnet, "perceptron": perceptron, "lstm": LSTM, "transformer": Transformer}
