"""A method of your own, in a file of your own, compared with the shipped ones.

    python examples/new_algorithm.py

FedBABU (Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022) trains
the body only and leaves the head as it was initialised; at the end every client fine-tunes its head. A recipe names it
by `new_algorithm:FedBABU`, that is `package.module:Class`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import personafl
from personafl.authoring import Algorithm, ClientState, LocalWork, Round, Stage, setting, whole


@dataclass(frozen=True, kw_only=True)
class FedBABU(Algorithm):
    """Average a body trained under the initial head; then every client trains a head of its own."""

    evaluates: ClassVar[str] = "the global body under the client's fine-tuned head"
    newcomers: ClassVar[str] = "the global body under the initial head, which it fine-tunes"

    head_epochs: float = setting(5.0, "epochs of the head at the end")

    def private(self) -> frozenset[str]:  # never travels; the rest is averaged
        return self.own_head()

    def schedule(self) -> list[Stage]:
        rounds = super().schedule()
        return [*rounds, Stage(number=len(rounds), phase="head", who="all", up=False)]

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        head = [n for n in self.info.parameters if n in self.info.head]
        body = [n for n in self.info.parameters if n not in self.info.head]
        if rnd.phase == "train":
            return [self.usual_turn(whole(body))]
        return [self.usual_turn(whole(head), self.head_epochs)]


if __name__ == "__main__":
    mine = {"name": "new_algorithm:FedBABU", "label": "fedbabu", "lr": 0.2, "head_epochs": 2.0}
    recipe = {
        "data": {"dataset": "digits", "partition": "dirichlet", "num_clients": 20, "alpha": 0.1, "unseen_ratio": 0.1},
        "training": {"num_rounds": 40, "join_ratio": 0.5, "local_epochs": 2, "batch_size": 10, "lr": 0.3},
        "algorithms": [{"name": "local"}, {"name": "fedavg-ft"}, {"name": "fedper"}, mine],
    }
    result = personafl.run(recipe)
    print(result.table())
    print("client 3's outputs:", result["fedbabu"].client(3).predict(torch.full((1, 1, 8, 8), 0.5)).numpy().round(2))
