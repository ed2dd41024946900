"""LG-FedAvg: clients keep their own features and share the last layers; both train together.

Liang, Liu, Ziyin, Salakhutdinov, Morency, "Think Locally, Act Globally", 2020. Choices: the final linear layer is
shared and by default there is no FedAvg warm start, as DM-PFL's numbers imply; heads are averaged uniformly, as the
authors' code does (which by its order of names shares the convolutions instead). With `warm_start` the first rounds are
FedAvg's, as that code begins; then every client receives the features once (stage `hand-over`) and keeps its own from
there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork
from personafl.core.settings import setting
from personafl.core.types import Download, Params, Payload, Round, Stage


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(Algorithm):
    """Average the last layers; each client keeps its own features below them."""

    evaluates: ClassVar[str] = "the client's own features under the global head"
    newcomers: ClassVar[str] = "the global head over the initial features, which it trains for a session"

    shared_layers: int = setting(1, "how many of the last layers are shared")
    warm_start: float = setting(0.0, "share of the rounds that are FedAvg's, before clients keep their features")
    weights: str = "uniform"

    def check(self) -> None:
        if self.shared_layers < 1:
            raise UserError(f"shared_layers={self.shared_layers}: must be at least 1")
        if not 0 <= self.warm_start < 1:
            raise UserError(f"warm_start={self.warm_start}: must be in [0, 1)")

    def private(self) -> frozenset[str]:
        if self.shared_layers == 1:
            return frozenset(self.info.shapes) - self.own_head()
        modules = dict.fromkeys(layer.weight.rpartition(".")[0] for layer in self.info.layers)  # one may have several
        last = list(modules)[-self.shared_layers :]
        shared = {n for layer in self.info.layers if layer.weight.rpartition(".")[0] in last for n in layer.names}
        if shared >= set(self.info.parameters):
            raise UserError(f"shared_layers={self.shared_layers}: that is all of the model; fedavg shares it all")
        return frozenset(self.info.shapes) - shared

    # The warm start: the server has the features too, under `start/`, and sends the whole model

    @property
    def _first(self) -> int:
        """How many rounds are FedAvg's; one is always left."""
        rounds = self.setup.training.num_rounds
        return min(round(self.warm_start * rounds), rounds - 1)

    def _statistics(self) -> frozenset[str]:
        """What stays with a client also under FedAvg."""
        return self.info.buffers if self.info.policy == "local" else frozenset()

    def not_averaged(self) -> bool:
        return self._first > 0  # the server has the features under other names than the uploads

    def needs_all_rounds(self) -> bool:
        return self._first > 0

    def schedule(self) -> list[Stage]:
        usual = super().schedule()
        if not self._first:
            return usual
        shared = [Stage(number=t, phase="fedavg") for t in range(self._first)]
        hand_over = Stage(number=self._first, phase="hand-over", who="all", up=False, evaluated=False)
        return [*shared, hand_over, *usual[self._first :]]

    def init_server(self, params: Params) -> Params:
        features = tree.select(params, self.private() - self._statistics()) if self._first else {}
        return super().init_server(params) | tree.prefixed(features, "start")

    def newcomer(self, params: Params, down: Download, ids: Tensor) -> Params:
        return super().newcomer(params | tree.under(tree.values(down.shared), "start"), down, ids)

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        head = tree.without(server, "start")
        if rnd.phase in ("fedavg", "hand-over"):
            return Download(shared=dict(head | tree.under(server, "start")))
        return Download(shared=dict(server if rnd.predicting else head))  # a newcomer begins with the features

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        if rnd.phase in ("fedavg", "hand-over"):
            return ClientState(params=self._received(kept, down))
        return super().start(kept, tree.without(down, "start"), rnd)

    def _received(self, kept: Params, down: Payload) -> Params:
        """The model as FedAvg would have it."""
        return tree.values(down) | tree.select(kept, self._statistics())

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [] if rnd.phase == "hand-over" else super().turns(local, rnd)

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        if rnd.phase == "fedavg":
            return dict(tree.exclude(local.params, self._statistics()))
        return super().upload(local, rnd)

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        if rnd.phase == "fedavg":
            return kept | tree.select(local.params, self._statistics())
        return super().keep(kept, local, rnd)

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        head, features = tree.without(server, "start"), tree.under(server, "start")
        if rnd.phase != "fedavg":
            return server | super().aggregate(head, sums, rnd)
        new = super().aggregate(head | features, sums, rnd)
        return tree.select(new, head) | tree.prefixed(tree.select(new, features), "start")

    def personal(self, kept: Params, down: Payload) -> Params:
        if down.keys() >= self.private() - self._statistics():  # still FedAvg's
            return tree.select(self._received(kept, down), self.info.shapes)
        return super().personal(kept, down)
