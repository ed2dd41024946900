"""`inference = "batch"` and `"stream"`: answers for the mix of classes that the inputs at hand seem to have.

A model that was trained free of label frequencies (`prior_free`) says how well an input fits each class, and who knows
how frequent classes are where the input comes from multiplies by that. A client knows how frequent they were in its own
training data, and estimates how frequent they are now from unlabelled inputs alone, by the EM algorithm of Saerens,
Latinne, Decaestecker, "Adjusting the Outputs of a Classifier to New a Priori Probabilities", Neural Computation 2002.
With z_i = (share z_own + (1 - share) z_global) / T the outputs for input i and pi the client's own frequencies,

    r_i = softmax(z_i + log q)                       what input i is, if classes have the frequencies q
    q   = (sum_i w_i r_i + pull pi) / (sum_i w_i + pull)

in turn, from q = pi. `pull` are inputs' worth of trust in the client's own frequencies: few inputs say little, many
outvote it. A batch has w_i = 1. A stream remembers the outputs of the last `window` inputs, each counting a share
`forgetting` less for every one that came after it; the input to be answered is one of them.

An estimate was chosen to fit, and fits better than the truth, by about half a nat for each frequency that was free. So
it is held against mixes that nobody chose, pi, equal frequencies and the mean of the two, by how likely each makes the
inputs, less `doubt` for each class but one that n = sum_i w_i inputs of the estimated mix would show (with 1 and many
inputs that is Akaike's criterion):

    L(p) = sum_i w_i log sum_k p_k softmax(z_i)_k
    a    = softmax(L(pi), L((pi + 1/K) / 2), L(1/K), L(q) - doubt (sum_k (1 - (1 - q_k)^n) - 1))
    p(y = k | x_i) = sum_p a_p softmax(z_i + log p)_k

Where inputs are the client's own, or of all classes alike, they are answered so; with `doubt` 0 always by z_i + log q.

Corrupted inputs fool an estimate: a network that is lost leans to some class or other, input after input, and that
looks like a mix of classes. Its first choice is also less far ahead of the second. With m the mean square of that lead,
(max_k z_ik - second_k z_ik)^2, and m_0 that on the client's validation data, `wary` adds to L(pi)

    wary max(0, 1 - m / m_0 - SLACK) sum_i w_i

so that inputs between whose classes the models can hardly tell are answered for the client's own classes.

With `calibrate` each client takes the T, from an eighth to eight times `temperature`, under which the labels of its
validation data are the likeliest given softmax(z + log pi), with a normal distribution of log T around that of
`temperature` as what was known before. How far `pull` should go its own data cannot tell, which are never shifted.

What a deployment has suffices: counts of training labels, both models, unlabelled inputs. Outputs of a personal model
trained without `prior_free` contain log pi; `contains_prior` takes it out of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.criteria import cross_entropy
from personafl.core.errors import UserError
from personafl.core.labels import label_counts, log_frequencies
from personafl.core.plugin_points import Answers
from personafl.core.settings import LARGEST
from personafl.core.types import Batch, Model, Params, Sweep, per_example

PRIOR = "labels/own"  # log pi, [C, K]
WARMTH = "labels/temperature"  # of each client that fits its own, [C]
LEAD = "labels/lead"  # m_0 before the temperature, [C]
MOST = 1e30  # nats, so that they can be added to others
SLACK = 0.3  # by which that of other classes may well be smaller
TRUST = 0.5  # in `temperature`: a normal distribution of its logarithm, which few examples do not outvote


@dataclass(frozen=True)
class LabelPrior:
    """What the rules of this file, and others that go by label frequencies, have in common."""

    class_labels_for: ClassVar[str] = "class frequencies"
    together: ClassVar[bool] = True

    share: float = field(default=0.5, metadata={"help": "of the client's own model in the outputs, the rest is global"})
    temperature: float = field(default=1.5, metadata={"help": "by which outputs are divided (T)"})
    pull: float = field(default=2.0, metadata={"help": "inputs' worth of trust in the client's own label frequencies"})
    doubt: float = field(
        default=1.0,
        metadata={
            "help": "in an estimated mix of classes beside the client's own and an equal one; 0: it alone answers"
        },
    )
    wary: float = field(
        default=0.0,
        metadata={"help": "of inputs told apart less clearly than validation data, in favour of own frequencies"},
    )
    contains_prior: bool = field(
        default=False, metadata={"help": "whether the own model's outputs contain the client's label frequencies"}
    )

    calibrate: bool = field(
        default=False, metadata={"help": "whether each client fits its temperature to its validation data"}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(f"share={self.share}: must be in [0, 1]")
        for name in ("temperature", "pull"):
            if not 0 < getattr(self, name) <= LARGEST:
                raise UserError(f"{name}={getattr(self, name)}: must be positive")
        for name in ("doubt", "wary"):
            if not 0 <= getattr(self, name) <= LARGEST:
                raise UserError(f"{name}={getattr(self, name)}: must be a number that is not negative")
        if self.wary and not self.doubt:
            raise UserError(
                f"wary={self.wary}: needs doubt in the estimate, which alone answers with doubt=0; set doubt, such as "
                "1, or leave wary out"
            )

    @property
    def asks_global(self) -> bool:
        return self.share < 1

    @property
    def asks_validation(self) -> str:
        return "calibrate=true" if self.calibrate else f"wary={self.wary:g}" if self.wary else ""

    def _who(self, own: str) -> str:
        return f"the global model and {own}" if self.asks_global and own != "the global model" else own

    def measure(self, method: Answers, deployed: Params, sweep: Sweep) -> Params:
        found = measured_frequencies(sweep)
        if self.wary:
            found |= {LEAD: self._usual_lead(method, deployed | found, sweep)}
        return found | {WARMTH: self._fitted(method, deployed | found, sweep)} if self.calibrate else found

    def _usual_lead(self, method: Answers, deployed: Params, sweep: Sweep) -> Tensor:
        """The mean square of leads on each client's validation data, `[C]`; 0 where it has none."""

        def leads(model: Model, batch: Batch) -> Params:
            mine = tree.take(deployed, slice(len(batch.x)))
            found = squared_lead(self.mixed(mine, *method.both_answers(model, mine, batch.x, batch.valid)).double())
            real = torch.ones_like(found, dtype=torch.bool) if batch.valid is None else batch.valid
            return {"leads": torch.where(real, found, 0).sum(1), "inputs": real.sum(1).to(found.dtype)}

        found = sweep(leads, "validation")
        if not found:
            return deployed[PRIOR].new_zeros(len(deployed[PRIOR]))
        return (found["leads"] / found["inputs"].clamp(min=1)).to(deployed[PRIOR].dtype)

    def _fitted(self, method: Answers, deployed: Params, sweep: Sweep) -> Tensor:
        """The temperature under which each client's validation labels are the likeliest, `[C]`."""
        prior = deployed[PRIOR]
        tried = prior.new_tensor([self.temperature * 2 ** (i / 4) for i in range(-12, 13)])

        def losses(model: Model, batch: Batch) -> Params:
            k = len(batch.x)
            mine = tree.take(deployed, slice(k))
            z = self.mixed(mine, *method.both_answers(model, mine, batch.x, batch.valid)).double()
            each = [z / t + mine[PRIOR].double().unsqueeze(1) for t in tried]
            nll = [per_example(cross_entropy, out, batch.y) for out in each]
            return {"nll": torch.stack([_of_inputs(n, batch.valid).sum(1) for n in nll], 1)}

        away = (tried / self.temperature).log().square() / (2 * TRUST**2)
        found = sweep(losses, "validation").get("nll", prior.new_zeros(len(prior), 1))
        return tried[(found + away).argmin(1)]

    def _prior(self, deployed: Params, like: Tensor) -> Tensor:
        """log pi as `[C, K]`."""
        return deployed[PRIOR].to(like.dtype)

    def _fit(self, deployed: Params, own: Tensor, common: Tensor) -> Tensor:
        """z, how well inputs fit each class: `[C, B, K]`."""
        return self.mixed(deployed, own, common) / self._warmth(deployed, own)

    def _given(
        self, deployed: Params, own: Tensor, common: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """z, in float32 at least, the same with zeros for what tells nothing, and what tells something, `[C, B]`.

        That is neither padding nor an input to which the models' answers are not finite.
        """
        exact = torch.promote_types(own.dtype, torch.float32)
        z = self._fit(deployed, own.to(exact), common.to(exact))
        finite = z.amax(-1).isfinite()
        tells = finite if valid is None else finite & valid
        return z, torch.where(tells.unsqueeze(2), z, 0), tells

    def _answered(self, deployed: Params, z: Tensor, seen: Tensor, weight: Tensor, now: Tensor) -> Tensor:
        """Answers `[C, B, K]` to inputs `z`, for the mixes of classes that `seen` `[C, N, K]` may have.

        `weight` `[C, N]` is what each of these counts, `now` `[C, K]` log q.
        """
        if not self.doubt:
            return z + now.unsqueeze(1)
        classes, own = z.shape[2], self._prior(deployed, z).exp()
        simple = [((1 - equal) * own + equal / classes).log() for equal in (0.0, 0.5, 1.0)]
        mixes = torch.stack([*simple, now], 1)  # [C, 4, K]
        likely = (_fits(seen, mixes).logsumexp(-1) * weight.unsqueeze(2)).sum(1)
        first = likely[:, :1] + self._suspicion(deployed, seen, weight)
        inputs = weight.sum(1, keepdim=True).clamp(min=1)
        shown = -torch.expm1(inputs * torch.log1p(-now.exp().clamp(max=1)))
        fitted = likely[:, -1:] - self.doubt * (shown.sum(1, keepdim=True) - 1).clamp(min=0)
        likely = torch.cat([first, likely[:, 1:-1], fitted], 1)
        what = torch.log_softmax(_fits(z, mixes), -1) + torch.log_softmax(likely, 1)[:, None, :, None]
        return what.logsumexp(2)

    def _suspicion(self, deployed: Params, seen: Tensor, weight: Tensor) -> Tensor | float:
        """What speaks for the client's own frequencies because leads are smaller than they should be, `[C, 1]`."""
        if not self.wary:
            return 0.0
        usual = deployed[LEAD].to(seen.dtype)
        each = squared_lead(seen * self._warmth(deployed, seen))
        now = (each * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        smaller = torch.relu(1 - now / torch.where(usual > 0, usual, 1) - SLACK)
        known = torch.where((usual > 0) & usual.isfinite(), smaller, 0)
        return (self.wary * known * weight.sum(1)).clamp(max=MOST).unsqueeze(1)

    def _warmth(self, deployed: Params, like: Tensor) -> Tensor:
        """T of each client, `[C, 1, 1]`."""
        if self.calibrate:
            return deployed[WARMTH].to(like.dtype).view(-1, 1, 1)
        return torch.full((len(like), 1, 1), self.temperature, dtype=like.dtype, device=like.device)

    def mixed(self, deployed: Params, own: Tensor, common: Tensor) -> Tensor:
        """z before it is divided by the temperature."""
        if self.contains_prior:
            own = own - self._prior(deployed, own).unsqueeze(1)
        if self.share in (0, 1):  # nothing of the other, were it infinite
            return own if self.share else common
        return self.share * own + (1 - self.share) * common


@dataclass(frozen=True)
class EstimatedPrior(LabelPrior):
    """Answers for the mix of classes of all inputs given at once."""

    in_turn: ClassVar[bool] = False
    steps: int = field(default=30, metadata={"help": "of the EM algorithm"})

    def words(self, own: str) -> str:
        return f"{self._who(own)}, for the mix of classes estimated from the batch"

    def decide(
        self, deployed: Params, own: Tensor, common: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Params]:
        z, seen, tells = self._given(deployed, own, common, valid)
        prior, weight = self._prior(deployed, z), tells.to(z.dtype)
        now = estimated(seen, weight, prior, prior, self.pull, self.steps)
        return self._answered(deployed, z, seen, weight, now).to(own.dtype), {}


@dataclass(frozen=True)
class RunningPrior(LabelPrior):
    """Answers input by input, for the mix of classes of the last ones."""

    in_turn: ClassVar[bool] = True
    window: int = field(default=64, metadata={"help": "inputs whose outputs are remembered"})
    forgetting: float = field(default=0.02, metadata={"help": "by how much less an input counts with each new one"})
    steps: int = field(default=5, metadata={"help": "of the EM algorithm for each input, from the estimate before"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise UserError(f"window={self.window}: must be at least 1")
        if not 0 <= self.forgetting < 1:
            raise UserError(f"forgetting={self.forgetting}: must be in [0, 1)")

    def words(self, own: str) -> str:
        return f"{self._who(own)}, for the mix of classes estimated from the inputs so far"

    def measure(self, method: Answers, deployed: Params, sweep: Sweep) -> Params:
        prior = super().measure(method, deployed, sweep)
        clients, classes = prior[PRIOR].shape
        seen = prior[PRIOR].new_zeros(clients, self.window, classes)
        return prior | {"labels/now": prior[PRIOR].clone(), "labels/seen": seen, "labels/weight": seen[..., 0].clone()}

    def decide(
        self, deployed: Params, own: Tensor, common: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Params]:
        z, sound, tells = self._given(deployed, own, common, valid)
        prior = self._prior(deployed, z)
        now, seen, weight = (deployed[f"labels/{n}"].to(z.dtype) for n in ("now", "seen", "weight"))
        answers = []
        for i in range(z.shape[1]):
            newer = torch.cat([seen[:, 1:], sound[:, i : i + 1]], 1)
            counts = torch.cat([weight[:, 1:] * (1 - self.forgetting), torch.ones_like(weight[:, :1])], 1)
            coming = estimated(newer, counts, prior, now, self.pull, self.steps)
            real = tells[:, i : i + 1]  # what tells nothing changes nothing
            now, weight = torch.where(real, coming, now), torch.where(real, counts, weight)
            seen = torch.where(real.unsqueeze(2), newer, seen)
            answers.append(self._answered(deployed, z[:, i : i + 1], seen, weight, now))
        state = {"labels/now": now, "labels/seen": seen, "labels/weight": weight}
        out = torch.cat(answers, 1) if answers else z
        return out.to(own.dtype), {n: t.to(deployed[n].dtype) for n, t in state.items()}


def measured_frequencies(sweep: Sweep) -> Params:
    """log pi of the clients' training labels, as rules keep it."""

    def counted(model: Model, batch: Batch) -> Params:
        return {"examples": label_counts(batch, model.info.outputs)}

    return {PRIOR: log_frequencies(sweep(counted)["examples"])}


def estimated(z: Tensor, weight: Tensor, prior: Tensor, begin: Tensor, pull: float, steps: int) -> Tensor:
    """log q `[C, K]` after so many steps of EM from `begin`; `z` is `[C, B, K]`, `weight` `[C, B]`."""
    total = weight.sum(1, keepdim=True) + pull
    log_q = begin
    for _ in range(steps):
        what = torch.softmax(z + log_q.unsqueeze(1), -1)
        log_q = (((what * weight.unsqueeze(2)).sum(1) + pull * prior.exp()) / total).log()
    return log_q


def _fits(z: Tensor, mixes: Tensor) -> Tensor:
    """How well inputs fit each class under each of these mixes, `[C, B, mixes, K]`."""
    return torch.log_softmax(z, -1).unsqueeze(2) + mixes.unsqueeze(1)


def _of_inputs(each: Tensor, valid: Tensor | None) -> Tensor:
    """Numbers of inputs, and 0 of padding."""
    return each if valid is None else torch.where(valid, each, 0)


def squared_lead(z: Tensor) -> Tensor:
    """By how much an input's largest output is ahead of the second, squared: `[C, B]`."""
    if z.shape[-1] < 2:
        return torch.zeros_like(z[..., 0])
    first, second = z.topk(2, -1).values.unbind(-1)
    return (first - second).square()
