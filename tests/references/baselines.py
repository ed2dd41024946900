"""FedAvg and the baselines that share all of a model, or one of its two parts."""

from __future__ import annotations

from torch import Tensor, nn

from personafl.core.types import Training
from personafl.data.federated import Federation
from tests.reference import Params
from tests.references.base import HEAD, Reference


class LocalOnly(Reference):
    """Every client by itself, trained when it is sampled."""

    def __init__(self, module: nn.Module, federation: Federation, training: Training) -> None:
        super().__init__(module, federation, training)
        self.own = [dict(self.initial) for _ in self.clients]

    def play(self, number: int) -> None:
        """E epochs of SGD from the client's own model; nothing travels."""
        for c in self.cohort(number):
            self.own[c] = self.train(c, number, self.own[c])

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The client's own model."""
        return self.logits(self.own[c], x)

    def common(self, x: Tensor) -> Tensor | None:
        """There is no server."""
        return None


class FedAvg(Reference):
    """E epochs from the server's model, then the mean."""

    def __init__(
        self, module: nn.Module, federation: Federation, training: Training, *, weights: str = "examples"
    ) -> None:
        super().__init__(module, federation, training)
        self.weights, self.w = weights, dict(self.initial)

    def local(self, c: int, number: int) -> Params:
        """What client c makes of the received model."""
        return self.train(c, number, self.w)

    def play(self, number: int) -> None:
        """w <- w - eta_g (w - mean)."""
        cohort = self.cohort(number)
        models = [self.local(c, number) for c in cohort]
        self.w = self.moved(self.w, self.mean(models, cohort, [*self.names, *self.running]))

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The global model."""
        return self.logits(self.seen_by(c, self.w), x)

    def common(self, x: Tensor) -> Tensor | None:
        """The global model, which without running statistics is not complete."""
        return self.logits(self.w, x) if self.own_statistics is None else None


class FedAvgFT(FedAvg):
    """FedAvg, then every client fine-tunes the final model and keeps the result."""

    def __init__(
        self, module: nn.Module, federation: Federation, training: Training, *, finetune_epochs: int = 0
    ) -> None:
        super().__init__(module, federation, training)
        self.epochs = finetune_epochs or None  # None: a usual session
        self.own: list[Params] = []

    def finish(self) -> None:
        """All layers, from the final w; streams and rate are those of a round T."""
        number = self.training.num_rounds
        self.own = [
            self.train(c, number, self.w, batches=self.stream(c, number).turn(self.epochs)) for c in self.clients
        ]

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The global model until the clients have tuned it."""
        return self.logits(self.own[c] if self.own else self.w, x)


class FedProx(FedAvg):
    """FedAvg with a pull towards the received model."""

    def __init__(
        self, module: nn.Module, federation: Federation, training: Training, *, proximal_weight: float = 0.05
    ) -> None:
        super().__init__(module, federation, training)
        self.mu = proximal_weight

    def local(self, c: int, number: int) -> Params:
        """F(w) + mu/2 ||w - w_t||^2."""

        def loss(params: Params, rows: Tensor) -> Tensor:
            distance = sum(((params[n] - self.w[n]) ** 2).sum() for n in self.names)
            return self.cross_entropy(params, rows) + self.mu / 2 * distance

        return self.train(c, number, self.w, loss=loss)


class Parts(Reference):
    """A model of which some tensors are the server's and the others every client's own."""

    def __init__(self, module: nn.Module, federation: Federation, training: Training, *, shared: list[str]) -> None:
        super().__init__(module, federation, training)
        self.shared, self.private = [*shared, *self.running], [n for n in self.names if n not in shared]
        self.server = {n: self.initial[n] for n in self.shared}
        self.own = [{n: self.initial[n] for n in self.private} for _ in self.clients]

    def local(self, c: int, number: int, start: Params) -> Params:
        """Joint SGD on both parts."""
        return self.train(c, number, start)

    def play(self, number: int) -> None:
        """The private part stays with the client, the shared part is averaged."""
        cohort, models = self.cohort(number), []
        for c in cohort:
            trained = self.local(c, number, {**self.server, **self.own[c]})
            self.own[c] = {n: trained[n] for n in self.private}
            models.append(trained)
        self.server = self.moved(self.server, self.mean(models, cohort, self.shared))

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The newest shared part and the client's own private part."""
        return self.logits(self.seen_by(c, {**self.server, **self.own[c]}), x)

    def common(self, x: Tensor) -> Tensor | None:
        """The server has only a part of a model."""
        return None


class LGFedAvg(Parts):
    """Private features, a common head (or several common last layers)."""

    weights = "uniform"

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        shared_layers: int = 1,
        warm_start: float = 0.0,
    ) -> None:
        layers = list(dict.fromkeys(name.rsplit(".", 1)[0] for name, _ in module.named_parameters()))
        last = layers[-shared_layers:]
        shared = [name for name, _ in module.named_parameters() if name.rsplit(".", 1)[0] in last]
        super().__init__(module, federation, training, shared=shared)
        self.first = round(warm_start * training.num_rounds)
        self.whole = dict(self.initial)  # FedAvg's model, while there is one
        self.warm = self.first > 0

    def play(self, number: int) -> None:
        """The first rounds are FedAvg's; then everybody takes its model and keeps the features."""
        if number < self.first:
            cohort = self.cohort(number)
            models = [self.train(c, number, self.whole) for c in cohort]
            self.whole = self.moved(self.whole, self.mean(models, cohort, self.names))
            return
        if self.warm:
            self.warm = False
            self.server = {n: self.whole[n] for n in self.shared}
            self.own = [{n: self.whole[n] for n in self.private} for _ in self.clients]
        super().play(number)

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """FedAvg's model, then own features under the newest head."""
        return self.logits(self.whole, x) if self.warm else super().evaluated(c, x)

    def common(self, x: Tensor) -> Tensor | None:
        """FedAvg's model, then only a part of one."""
        return self.logits(self.whole, x) if self.warm else None


class FedPer(Parts):
    """A common body, private heads."""

    def __init__(self, module: nn.Module, federation: Federation, training: Training) -> None:
        shared = [name for name, _ in module.named_parameters() if name not in HEAD]
        super().__init__(module, federation, training, shared=shared)


class FedRep(FedPer):
    """As FedPer, but first the head, then the body."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        head_epochs: int = 0,
        body_epochs: int = 0,
        final_head_epochs: int = 0,
    ) -> None:
        super().__init__(module, federation, training)
        self.head_epochs, self.body_epochs = head_epochs or None, body_epochs or None  # None: a usual session
        self.final_head_epochs = final_head_epochs

    def local(self, c: int, number: int, start: Params) -> Params:
        """The head with the body frozen, then the body with the head frozen."""
        stream = self.stream(c, number)
        model = self.train(c, number, start, moving=HEAD, batches=stream.turn(self.head_epochs))
        return self.train(c, number, model, moving=self.body, batches=stream.turn(self.body_epochs))

    def finish(self) -> None:
        """Every client may train its head once more, on the final body."""
        for c in self.clients:
            start = {**self.server, **self.own[c]}
            batches = self.stream(c, self.training.num_rounds).turn(self.final_head_epochs)
            trained = self.train(c, self.training.num_rounds, start, moving=HEAD, batches=batches)
            self.own[c] = {n: trained[n] for n in self.private}
