"""The nouns of the framework, and the shape legend every file follows.

Shapes stand in trailing comments: `C` clients of a stack, `B` examples of a batch,
`K` classes, `N` rows of a data set, `...` the shape of one parameter. A tensor on
the client's side always has the client axis first, also when the stack holds one
client; a tensor on the server's side has none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.normalization import Normalization
from personafl.core.settings import BOUNDS, Section, setting, unknown

Params = dict[str, Tensor]
"""Named tensors. A second model beside the first has its names behind a prefix, `personal/fc.weight`."""

Row = dict[str, Any]
"""Plain values by name, as JSON has them: a stage in metrics.jsonl, a client in clients.csv, the head of a message.

A stage's row has `round` and `phase`; `personal`, `global` and `validation` with a mean and a deviation where it was
evaluated; and what went wrong in it, such as `diverged`. Which keys there are depends on the run.
"""

Summary = dict[str, Any]
"""What a method and seed came to, as summary.json has it; `evaluation/run_records.py` checks what must be there."""

Moves = Mapping[str, Tensor | None]
"""What may move: name to a mask of positions `[C, ...]`, or None for the whole tensor."""

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Outputs `[M, ...]` and targets `[M, ...]` to one loss (or score) per example, `[M]`."""

TaskName = Literal["classification", "regression", "multilabel", "sequence"]
"""What targets are: `core/tasks.py` has their types and shapes."""

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """What models are judged by: numbers of each example, and what those of a client's examples come to.

    `per_example` gives one number `[M]`, and a client's is their mean; or several, `[M, S]`, where it is no mean. Then
    `reduce` makes it of those of all its examples: float64 `[n, ..., S]` to `[...]`, over the first axis.
    """

    per_example: Criterion
    name: str = ""  # empty: that of the function
    better: Better = "higher"
    reduce: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(self.per_example, "__name__", "metric"))

    def of_client(self, found: Tensor) -> Tensor:
        """A client's number, float64 `[...]`, from those of its examples, `[n, ...]` or `[n, ..., S]`."""
        return found.double().mean(0) if self.reduce is None else self.reduce(found.double())


LOSSES: dict[TaskName, dict[str, Criterion]] = {}
"""The losses of each task by name, the first its default; `core/criteria.py` fills it."""


@dataclass(frozen=True)
class Masked:
    """A tensor of which only the positions of a mask cross the network.

    `known` says that the receiver already has the mask (an upload under the mask just
    received), so that only values travel. Values outside the mask are zero by construction:
    what does not travel cannot be used.
    """

    values: Tensor
    mask: Tensor
    known: bool = False

    def __post_init__(self) -> None:
        assert self.mask.dtype == torch.bool and self.mask.shape == self.values.shape
        object.__setattr__(self, "values", torch.where(self.mask, self.values, self.values.new_zeros(())))


Payload = dict[str, Tensor | Masked]
"""What crosses the network: named tensors, each dense or masked."""


@dataclass(frozen=True)
class Download:
    """What a cohort receives: tensors common to all, and one row per client where a method needs it."""

    shared: Payload = field(default_factory=dict)
    own: Payload = field(default_factory=dict)  # [C, ...]


@dataclass(frozen=True)
class Batch:
    """One minibatch of every client in a stack."""

    x: Tensor  # [C, B, ...]
    y: Tensor  # [C, B, ...]
    valid: Tensor | None  # [C, B] bool, None when every place holds an example
    count: Tensor  # [C] examples per client
    keys: Tensor  # [C] int64: the random stream of this client's step
    others: tuple[Batch, ...] = ()  # the step's further minibatches, where a turn asks for several

    def mean(self, values: Tensor) -> Tensor:
        """Average per-example values `[C, B]` over each client's real examples: `[C]`."""
        if self.valid is not None:
            values = torch.where(self.valid, values, 0)
        return values.sum(1) / self.count.clamp(min=1).to(values.dtype)


CriterionGradient = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]
"""Outputs `[C, B, K]` to each client's mean loss `[C]`, and the gradient of their sum by the outputs."""


@dataclass(frozen=True)
class Examples:
    """The local data of a stack of clients: rows of one tensor, never copied."""

    x: Tensor  # [N, ...], on the device or on the host
    y: Tensor  # [N, ...]
    rows: Tensor  # [C, M] int64 into x and y, padded with 0
    count: Tensor  # [C] int64 on the host: how many of a client's M places are real
    ids: Tensor  # [C] int64 on the host: client ids, they key the random streams
    augment: bool = False  # images of training minibatches are cut out and turned anew
    normalization: Normalization | None = None  # of what a model sees; x is not normalised
    target_normalization: Normalization | None = None  # of what training sees; y is in the targets' own units

    def in_training_units(self) -> Examples:
        """The same with the targets as training sees them."""
        if self.target_normalization is None:
            return self
        return replace(self, y=self.target_normalization(self.y, self.y.dtype), target_normalization=None)


@dataclass(frozen=True)
class Layer:
    """A weight matrix that activations are multiplied by, as sparsity rules and cost accounting see it.

    Of a linear or convolution module, a recurrent layer, attention, or a bare parameter, with two axes or more.
    """

    weight: str
    bias: str | None
    shape: tuple[int, ...]  # of the weight
    macs: int  # multiply-accumulates of one example's forward pass
    outputs: int  # outputs of one example that a bias is added to
    feedforward: bool = True  # whether it is a linear or convolution module, whose rows are units
    biases: int | None = None  # numbers in the bias; None: one per row of the weight

    @property
    def weights(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def size(self) -> int:
        """Weights and biases."""
        if self.bias is None:
            return self.weights
        return self.weights + (self.shape[0] if self.biases is None else self.biases)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


BufferPolicy = Literal["average", "local", "drop"]
OptimizerName = Literal["sgd", "adam", "adamw"]
Arithmetic = Literal["float64", "float32", "tf32", "bf16"]
Precision = Literal["auto", Arithmetic]
"""How products are taken. Weights are float32 under the last two, which differ from float32 on a GPU only: tf32 rounds
the factors of every product, bf16 those of convolutions, and of linear layers over sequences, more coarsely."""


@dataclass(frozen=True)
class ModelInfo:
    """What algorithms know about a model."""

    shapes: Mapping[str, tuple[int, ...]]  # every tensor a client holds: parameters, then running statistics
    buffers: frozenset[str]  # the running statistics among them
    head: frozenset[str]
    layers: tuple[Layer, ...]  # in the order of the forward pass
    other_flops: int = 0  # forward FLOP of one example outside `layers`
    activations: int = 0  # numbers one example's forward pass leaves behind, about
    policy: BufferPolicy = "average"
    features: int = 0  # numbers of one example that enter the head; 0 where the head is no layer of its own
    without_features: str = ""  # why `features` is 0
    outputs: int = 0  # numbers the model gives for one example
    norms: frozenset[str] = frozenset()  # the parameters of normalisation layers
    products: Mapping[int, int] = field(default_factory=dict)
    """The part of `other_flops` that is of products of activations, by how many layers lie before them."""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        return tuple(n for n in self.shapes if n not in self.buffers)

    @cached_property
    def of_layers(self) -> frozenset[str]:
        """The weights and biases of layers."""
        return frozenset(n for layer in self.layers for n in layer.names)


class Model(Protocol):
    """A network over stacked parameters."""

    info: ModelInfo

    def __call__(self, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Outputs `[C, B, K]` for inputs `[C, B, ...]`, of which `valid` `[C, B]` are no padding.

        In training mode (dropout, batch statistics) when the clients' streams `keys` `[C]` are given.
        """
        ...

    def features(
        self,
        params: Params,
        x: Tensor,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What enters the head, `[C, B, D]`, and the outputs; the head sees what `change` makes of the features."""
        ...


class TrainedModel(Model, Protocol):
    """A network as training and evaluation ask it."""

    @property
    def looks_at_batches(self) -> bool:
        """Whether an output goes by the other examples of its batch, also in evaluation."""
        ...

    @property
    def one_by_one(self) -> bool:
        """Whether clients gain nothing from a stack where the model lies, and run one at a time."""
        ...

    @property
    def channels_last(self) -> frozenset[str]:
        """The weights of convolutions that may lie channels last in memory where a client runs by itself on a GPU."""
        ...

    @property
    def pads(self) -> bool:
        """Whether padding changes nothing for the other examples of a minibatch."""
        ...

    def closed_form_gradients(
        self, params: Params, names: Collection[str], batch: Batch, slope: CriterionGradient
    ) -> tuple[Tensor, Params] | None:
        """Losses `[C]` and the gradients of these parameters without autograd; None where there is no such way."""
        ...

    def differentiate(self, loss: Tensor, leaves: Params) -> tuple[Params, dict[str, list[int]]]:
        """Compute gradients where the loss has some; and, where it has some for a part of the clients, the others."""
        ...


class Sweep(Protocol):
    """A pass over the clients' data without training: per-client sums of what is measured on each batch."""

    def __call__(
        self, measure: Callable[[Model, Batch], Params], split: Literal["train", "validation"] = "train"
    ) -> Params: ...


@dataclass(frozen=True)
class Task:
    """What is being learnt: a model, the loss of an example, and what models are judged by."""

    model: Model
    criterion: Criterion
    metric: Metric

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Each client's mean training loss on its minibatch: `[C]`."""
        out = self.model(params, batch.x, batch.valid, batch.keys)
        return batch.mean(per_example(self.criterion, out, batch.y))


@dataclass(frozen=True)
class TrainedTask(Task):
    """The same as those who train and evaluate have it; losses may put another model in its place."""

    model: TrainedModel


def per_example(criterion: Criterion, out: Tensor, y: Tensor) -> Tensor:
    """Apply a per-example criterion to stacked outputs `[C, B, ...]`: `[C, B]`."""
    stack, size = y.shape[:2]
    return criterion(out.flatten(0, 1), y.flatten(0, 1)).view(stack, size)


MOST = 10**6  # rounds, and epochs or minibatches in one


@dataclass(frozen=True)
class Training(Section):
    """How local training goes unless a method says otherwise; the `[training]` section of a recipe."""

    section: ClassVar[str] = "training"

    num_rounds: int = setting(100, "rounds of communication")
    join_ratio: float = setting(0.1, "share of the clients that take part in a round")
    local_epochs: int = setting(5, "passes over a client's training data in a round")
    local_steps: int = setting(0, "minibatches of a client in a round, in place of epochs; 0: epochs count")
    batch_size: int = setting(64, "examples of a minibatch")
    optimizer: OptimizerName = setting("sgd", "optimiser of local training, fresh in every round")
    lr: float = setting(0.1, "learning rate")
    lr_decay: float = setting(1.0, "factor of the learning rate from round to round")
    lr_milestones: tuple[int, ...] = setting((), "rounds from which the rate is a tenth of before")
    momentum: float = setting(0.0, "momentum of sgd")
    weight_decay: float = setting(0.0, "weight decay; adamw's is apart from the gradient")
    grad_clip: float = setting(0.0, "largest norm of a client's gradient; 0: any")
    task: Literal["auto"] | TaskName = setting("auto", "what is learnt; auto: by the targets")
    loss: str | Criterion = setting("auto", "loss of an example: a name or package.module:function; auto: by the task")
    server_lr: float = setting(1.0, "step of the server towards the mean of the clients")
    augment: Literal["none", "crop-flip"] = setting("none", "what is done to training images")
    precision: Precision = setting("auto", "arithmetic of training and evaluation; auto: tf32 on a GPU, else float32")
    seed: int = setting(0, "what all random streams begin with")
    patience: int = setting(
        0, "evaluations in a row without a better mean on validation data after which training stops; 0: none"
    )
    target: float | None = setting(
        None, "mean score of clients' own models, on validation data or else on test data, at which training stops"
    )

    def check(self) -> None:
        known = ["auto", *dict.fromkeys(name for of_task in LOSSES.values() for name in of_task)]
        if isinstance(self.loss, str) and ":" not in self.loss and self.loss not in known:
            raise UserError(
                f"training.loss={self.loss!r}: {unknown('loss', self.loss, known)}, or package.module:function"
            )
        self.hold(
            [
                ("num_rounds", 1 <= self.num_rounds <= MOST, f"at least 1 and at most {MOST}"),
                ("join_ratio", 0 < self.join_ratio <= 1, "in (0, 1]"),
                ("local_epochs", 1 <= self.local_epochs <= MOST, f"at least 1 and at most {MOST}"),
                ("local_steps", 0 <= self.local_steps <= MOST, f"not negative and at most {MOST}"),
                ("batch_size", self.batch_size >= 1, "at least 1"),
                *((name, fine(getattr(self, name)), must) for name, (fine, must) in BOUNDS.items()),
                ("lr_decay", 0 < self.lr_decay <= 1, "in (0, 1]"),
                ("lr_milestones", all(m >= 0 for m in self.lr_milestones), "rounds, not negative"),
                ("server_lr", self.server_lr > 0, "greater than 0"),
                ("seed", self.seed >= 0, "not negative"),
                ("patience", self.patience >= 0, "not negative"),
            ]
        )

    @property
    def arithmetic(self) -> Arithmetic:
        """The precision; while it is `auto`, no device has been chosen, and no factor is rounded."""
        return "float32" if self.precision == "auto" else self.precision

    @property
    def stops_early(self) -> str:
        """The setting by which training may stop before its last round; empty where there is none."""
        return "patience" if self.patience else "target" if self.target is not None else ""

    def cohort(self, clients: int) -> int:
        """How many of these clients a round samples."""
        return max(1, int(self.join_ratio * clients + 1e-9))

    def rate(self, rnd: int) -> float:
        """The learning rate of a round."""
        return self.lr * self.lr_decay**rnd * 0.1 ** sum(rnd >= m for m in self.lr_milestones)


@dataclass(frozen=True)
class Setup:
    """What an algorithm is bound to before it runs."""

    model: ModelInfo
    training: Training
    num_clients: int
    num_examples: int = 0  # the training examples of all of them; 0: not known


@dataclass(frozen=True)
class Stage:
    """One entry of an algorithm's schedule.

    A comparison is fair because stage `number` draws the same cohort and batches for every method.
    """

    number: int
    phase: str = "train"
    who: Literal["sampled", "all", "nobody"] = "sampled"
    down: bool = True  # whether the server sends anything
    up: bool = True  # whether the clients do
    in_paper: bool = True  # whether the papers' way of counting traffic sees this stage
    evaluated: bool = True  # whether it may be followed by an evaluation


@dataclass(frozen=True)
class Round:
    """What the hooks of one stage are told."""

    stage: Stage
    lr: float
    predicting: bool = False  # whether what is sent is for prediction alone, behind the stage

    @property
    def number(self) -> int:
        return self.stage.number

    @property
    def phase(self) -> str:
        return self.stage.phase
