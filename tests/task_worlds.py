"""Federations of tasks other than classification, made by formulas, and the sequence models of a user.

In each, clients have something in common that is worth sharing (a nonlinear map, most transitions of a language) and
something of their own that one model for all cannot have (coefficients, the rest of the transitions), and too few
examples to learn the common part alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from personafl import Federation, Source, arrays

ALPHABET = 10
LENGTH = 12


def regression(seed: int, clients: int = 20, each: int = 48) -> Federation:
    """Prices of districts: eight features, a common nonlinear map of them, and each client's own coefficients.

    As the features of California housing (income, age, rooms, ...) they are skewed and shifted from client to client;
    y = (w + v_c) . tanh(A z + a) + b_c + noise, with w, A, a common and v_c, b_c the client's.
    """
    draw = np.random.default_rng([seed, 1])
    basis, offset, common = draw.normal(0, 0.6, (8, 6)), draw.normal(0, 0.5, 6), draw.normal(0, 1.0, 6)
    xs, ys = [], []
    for _ in range(clients):
        own, price, centre = draw.normal(0, 0.7, 6), draw.normal(0, 0.7), draw.normal(0, 0.3, 8)
        z = centre + draw.normal(size=(each, 8))
        x = np.concatenate([np.exp(z[:, :2] / 2), z[:, 2:]], 1)  # incomes and populations have a long tail
        xs.append(x)
        ys.append(np.tanh(z @ basis + offset) @ (common + own) + price + draw.normal(0, 0.2, each))
    return _built(arrays(np.concatenate(xs), np.concatenate(ys).astype(np.float32)), clients, each, seed)


def multilabel(seed: int, clients: int = 20, each: int = 48) -> Federation:
    """Five labels that occur together or not, by common nonlinear features and each client's own taste."""
    draw = np.random.default_rng([seed, 2])
    basis, offset, common = draw.normal(0, 0.6, (10, 8)), draw.normal(0, 0.5, 8), draw.normal(0, 1.5, (8, 5))
    xs, ys = [], []
    for _ in range(clients):
        own, often = draw.normal(0, 1.2, (8, 5)), draw.normal(0, 0.8, 5)
        x = draw.normal(size=(each, 10))
        logits = np.tanh(x @ basis + offset) @ (common + own) + often
        xs.append(x)
        ys.append(draw.random((each, 5)) < 1 / (1 + np.exp(-2 * logits)))
    return _built(arrays(np.concatenate(xs), np.concatenate(ys)), clients, each, seed)


def next_character(seed: int, clients: int = 12, each: int = 32) -> Federation:
    """Lines over ten characters: the next one depends on the two before, for seven pairs of ten in the same way.

    A pair is followed by its usual character in nine cases of ten, else by any. Three pairs of ten have another usual
    character for each client. Lines are of 6 to 12 characters; behind their end there is no target.
    """
    draw = np.random.default_rng([seed, 3])
    usual = draw.integers(ALPHABET, size=(ALPHABET, ALPHABET))
    xs, ys = [], []
    for _ in range(clients):
        other = draw.integers(ALPHABET, size=usual.shape)
        follows = np.where(draw.random(usual.shape) < 0.3, other, usual)
        lines = draw.integers(ALPHABET, size=(each, LENGTH + 1))
        for t in range(2, LENGTH + 1):
            kept = draw.random(each) < 0.9
            lines[:, t] = np.where(kept, follows[lines[:, t - 2], lines[:, t - 1]], lines[:, t])
        targets = lines[:, 1:].copy()
        targets[:, 0] = -100  # what follows the first character is anybody's guess
        ends = draw.integers(6, LENGTH + 1, each)
        targets[np.arange(LENGTH) >= ends[:, None]] = -100
        xs.append(lines[:, :-1])
        ys.append(targets)
    return _built(arrays(np.concatenate(xs), np.concatenate(ys), classes=ALPHABET), clients, each, seed)


def _built(source: Source, clients: int, each: int, seed: int) -> Federation:
    return Federation.build(source, np.split(np.arange(clients * each), clients), seed)


class LSTM(nn.Module):
    """The next character at every position, by a recurrent network."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ALPHABET, 16)
        self.lstm = nn.LSTM(16, width, batch_first=True)
        self.head = nn.Linear(width, ALPHABET)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return out


class Transformer(nn.Module):
    """The next character at every position, by a two-layer transformer encoder that does not look ahead."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ALPHABET, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(_Block(width), _Block(width))
        self.head = nn.Linear(width, ALPHABET)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device).expand(x.shape)
        out: Tensor = self.head(self.blocks(self.embedding(x) + self.places(place)))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.then = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        m, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(m, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [M, heads, L, D]
        x = x + self.out(seen.transpose(1, 2).reshape(m, length, width))
        return x + self.down(self.up(self.then(x)).relu())
