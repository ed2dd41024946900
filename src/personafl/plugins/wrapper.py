"""A method around another method: the base of what fills a slot.

By default every hook is the inner method's, save that a part deploys and predicts by its own `personal` and `answer`.
What a part adds has names under its own prefix, which the inner method never sees: its state, its payload entries,
its sums. In `ClientState` a part adds to `fixed` only, for what is in `params` may be uploaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import FROM_TRAINING, Algorithm, ClientState, LocalWork
from personafl.core.types import Download, Model, Params, Payload, Round, Stage, Training


@dataclass(frozen=True, kw_only=True)
class MethodWrapper(Algorithm):
    """All hooks of `base`, to be overridden where the part differs."""

    prefix: ClassVar[str]
    plugin_point: ClassVar[str] = ""  # the setting that puts this plug-in around a method; empty: it is a method itself

    base: Algorithm

    @classmethod
    def around(cls, base: Algorithm, **settings: object) -> Self:
        """This part around a method that is bound already."""
        same = {n: getattr(base, n) for n in (*FROM_TRAINING, "inference", "bound")}
        return cls(base=base, **same, **settings)  # type: ignore[arg-type]

    @property
    def called(self) -> str:
        return self.base.called

    def theirs(self, state: Params) -> Params:
        """What the inner method sees of a state."""
        return tree.without(state, self.prefix)

    def theirs_of(self, payload: Payload) -> Payload:
        return tree.without(payload, self.prefix)

    def mine(self, state: Params) -> Params:
        """What the part added, without its prefix."""
        return tree.under(state, self.prefix)

    def own(self, state: Params) -> Params:
        """The part's state under the names it is kept by; inverse of `mine`."""
        return tree.prefixed(state, self.prefix)

    def needs_uploads(self) -> bool:
        return self.base.needs_uploads()

    def not_averaged(self) -> bool:
        return self.base.not_averaged()

    def needs_all_rounds(self) -> bool:
        return self.base.needs_all_rounds()

    def training_at(self, stage: Stage) -> Training:
        return self.base.training_at(stage)

    def rate(self, stage: Stage) -> float:
        return self.base.rate(stage)

    def private(self) -> frozenset[str]:
        return self.base.private()

    def travels(self) -> frozenset[str]:
        return self.base.travels()

    def schedule(self) -> list[Stage]:
        return self.base.schedule()

    def init_server(self, params: Params) -> Params:
        return self.base.init_server(params)

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        return self.base.init_clients(params, ids)

    def init_known(self, params: Params, ids: Tensor) -> Params:
        return self.base.init_known(params, ids)

    def init_coverage(self, params: Params) -> Params:
        return self.base.init_coverage(params)

    def newcomer(self, params: Params, down: Download, ids: Tensor) -> Params:
        return self.base.newcomer(params, Download(self.theirs_of(down.shared), self.theirs_of(down.own)), ids)

    def welcome(self) -> str:
        return self.base.welcome()

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        return self.base.download(self.theirs(server), self.theirs(known), rnd)

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        return self.base.start(self.theirs(kept), self.theirs_of(down), rnd)

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return self.base.turns(local, rnd)

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        return self.base.upload(local, rnd)

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        return kept | self.base.keep(self.theirs(kept), local, rnd)

    def screen(self, server: Params, upload: Payload, rnd: Round) -> tuple[Tensor | None, Payload]:
        mine = tree.exclude(upload, self.theirs_of(upload))
        rows, used = self.base.screen(self.theirs(server), self.theirs_of(upload), rnd)
        return rows, used | (mine if rows is None else tree.rows_of(mine, rows))

    def weigh(self, server: Params, known: Params, upload: Payload, examples: Tensor, rnd: Round) -> Tensor:
        return self.base.weigh(self.theirs(server), self.theirs(known), self.theirs_of(upload), examples, rnd)

    def updates(self, server: Params, upload: Payload) -> Params:
        return self.base.updates(self.theirs(server), self.theirs_of(upload))

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        return self.base.summands(self.theirs_of(upload), weights, rnd)

    def remember(self, known: Params, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        return known | self.base.remember(self.theirs(known), self.theirs_of(upload), weights, rnd)

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        return server | self.base.aggregate(self.theirs(server), self.theirs(sums), rnd)

    def lasting(self, upload: Payload, examples: Tensor, rnd: Round) -> Params:
        return self.base.lasting(self.theirs_of(upload), examples, rnd)

    def withdraw(self, server: Params, lasting: Params) -> Params:
        return server | self.base.withdraw(self.theirs(server), self.theirs(lasting))

    def without_uploads(self, server: Params, rnd: Round) -> Params:
        return server | self.base.without_uploads(self.theirs(server), rnd)

    def coverage(self, sums: Params) -> Params:
        return self.base.coverage(self.theirs(sums))

    def personal(self, kept: Params, down: Payload) -> Params:
        return self.base.personal(self.theirs(kept), self.theirs_of(down))

    def common(self, down: Payload) -> Params | None:
        return self.base.common(self.theirs_of(down))

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        return self.base.after_training(self.theirs(kept), local, self.theirs_of(down), rnd)

    def downloaded_model(self, kept: Params, down: Payload, rnd: Round) -> Params | None:
        return self.base.downloaded_model(self.theirs(kept), self.theirs_of(down), rnd)

    def personalised_model(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params | None:
        return self.base.personalised_model(self.theirs(kept), local, self.theirs_of(down), rnd)

    def client_masks(self, kept: Params, down: Payload) -> Params:
        return self.base.client_masks(self.theirs(kept), self.theirs_of(down))

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.base.answer(model, own, x, valid)

    def common_answer(self, model: Model, common: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.base.common_answer(model, common, x, valid)

    def notes(self, server: Params) -> dict[str, float]:
        return self.base.notes(self.theirs(server))

    def evaluated(self, when: str) -> str:
        own = self.base.evaluated(when)
        return own if self.inference == self.base.inference or self.rule is None else self.rule.words(own)

    def shared(self) -> list[str]:
        """The parameters that travel."""
        stays = self.base.private()
        return [n for n in self.info.parameters if n not in stays]


def responsible(method: Algorithm, holds: Callable[[Algorithm], bool]) -> str:
    """Return the name of that part of a method for which a hook is true, to begin an error message.

    Args:
        method: A bound method, possibly with plug-ins around it, for which the hook is true.
        holds: Calls the hook, such as `Algorithm.needs_all_rounds`, of the method it is given.

    Returns:
        The name of the method, such as "DMPFL", or of the plug-in, such as "The plug-in inherit of FedAvg".
    """
    while isinstance(method, MethodWrapper) and holds(method.base):
        method = method.base
    if isinstance(method, MethodWrapper):
        return f"The plug-in {method.plugin_point} of {method.called}" if method.plugin_point else type(method).__name__
    return method.called
