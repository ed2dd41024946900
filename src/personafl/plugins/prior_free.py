"""The `prior_free` slot: local training that does not learn how often each class occurs at a client.

A client that has seen few ships learns that ships are rare, and its update teaches this to everybody. With the log of
its own label frequencies added to the outputs in the loss (logit adjustment: Menon et al., "Long-tail learning via
logit adjustment", ICLR 2021; balanced softmax: Ren et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition",
NeurIPS 2020), that part is explained by what is added, and the model is left with what inputs say of classes:

    loss = CE(z + log pi_c, y),    pi_c(k) = (n_ck + s) / (n_c + s K)

n_ck are the client's training examples of class k, and s is 1. Where all clients train so, the model answers as if
classes were equally frequent, and whoever uses it may put in the frequencies he expects (the `inference` slot). The
counts are taken in every session, from the data at hand; nothing of them is kept or sent. What is added is added to
every output of `task.model` in a loss, also to those of teachers and of second models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from personafl.core.labels import label_pass, log_frequencies
from personafl.core.local_work import ClientState, GradientPass, LocalWork, Turn
from personafl.core.types import Round
from personafl.plugins.wrapper import TrainingWrapper


@dataclass(frozen=True, kw_only=True)
class PriorFree(TrainingWrapper):
    """A method whose local losses leave out the client's label frequencies."""

    prefix: ClassVar[str] = "prior"

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        turns = [self._free(t) for t in super().turns(local, rnd)]
        trains = any(isinstance(t, Turn | GradientPass) for t in turns)
        return [label_pass(self._name, self.info.outputs, log_frequencies), *turns] if trains else turns

    def _free(self, turn: LocalWork) -> LocalWork:
        match turn:
            case Turn():
                then = None if turn.then is None else self._free(turn.then)
                assert then is None or isinstance(then, Turn)
                return replace(turn, added=self._name, then=then)
            case GradientPass():
                return replace(turn, added=self._name)
        return turn

    @property
    def _name(self) -> str:
        return f"{self.prefix}/log"
