"""Recurrent networks."""

from __future__ import annotations

from torch import Tensor, nn


class CharLSTM(nn.Module):
    """The next character from those before: an embedding, two LSTM layers, a linear layer on the last state."""

    def __init__(self, characters: int, embedding: int = 8, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        out: Tensor = self.head(states[:, -1])
        return out


class TokenLSTM(CharLSTM):
    """The same with a prediction at every position, `[M, L, K]`: the next token from those up to it."""

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        out: Tensor = self.head(states)
        return out
