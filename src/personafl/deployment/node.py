"""A client of a real federation: answers the server's requests from its own data and its own disk.

A request may come twice, may have been preceded by others that never arrived, and is answered by a process of its own:
nothing is remembered but in `private_state.py`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from personafl.config import Recipe
from personafl.core import tree, wire
from personafl.core.errors import UserError
from personafl.core.hook_checks import check_kept
from personafl.core.torch_state import products, threads
from personafl.core.types import Download, Examples, Metric, Params, Payload, Round, Stage
from personafl.data.federated import Split
from personafl.data.normalize import Moments
from personafl.deployment import local_data, requests
from personafl.deployment.federation_spec import (
    FORMAT,
    VERSION,
    Form,
    OtherModelError,
    Parts,
    World,
    build_parts,
    check_format,
    check_model,
    read_recipe,
)
from personafl.deployment.local_data import LocalData
from personafl.deployment.local_model import MODEL, write_model
from personafl.deployment.messages import Reply, Request
from personafl.deployment.private_state import PrivateState
from personafl.deployment.settings import NAME, OTHER_KEY, ClientSettings
from personafl.deployment.stored_split import SPLIT, StoredSplit
from personafl.engine import admission
from personafl.engine.local import client_round
from personafl.evaluation.batch_inference import client_scores
from personafl.evaluation.evaluate import deployed, finite, scores
from personafl.storage.lock import locked

log = logging.getLogger("personafl")
WHERE = "At the client it has to be installed, or its file has to be beside client.toml or in modules/ there."
ACTIVATIONS = 2.0**30  # bytes that one forward pass of an evaluation may leave behind


class Node:
    """One client."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.root = Path(settings.state)

    def answer(self, request: Request) -> Reply:
        """What is asked for; a reply with `error` where that cannot be, in words that tell nothing of the data."""
        told = request.told
        try:
            experiment = told.get("experiment")
            if not isinstance(experiment, str) or not NAME.fullmatch(experiment):
                raise UserError(f"experiment {experiment!r:.80}: not a name")
            match request.kind:
                case "hello":
                    return self._hello(told)
                case "describe":
                    return self._describe(told)
                case "work":
                    with threads(self.settings.threads or torch.get_num_threads()):
                        return self._work(told, request.blobs)
        except _DataError as e:
            log.error("client %s: its data cannot be used: %s", self.settings.id, e)
            return Reply({"error": "its data cannot be used; its log has why"})
        except (UserError, wire.WireError) as e:
            log.error("client %s: %s", self.settings.id, e)
            other_model = {"other_model": True} if isinstance(e, OtherModelError) else {}
            return Reply({"error": str(e)[:500], **other_model})
        except OSError as e:
            log.error("client %s: %s", self.settings.id, e)
            return Reply({"error": e.strerror or "its disk cannot be written to"})
        except Exception as e:  # anything: of a message it would tell the server, which is told no more than the kind
            log.exception("client %s failed", self.settings.id)
            return Reply({"error": f"{type(e).__name__} at the client; its log has where"})
        raise AssertionError(request.kind)

    # Who is here

    def _state(self, told: Mapping[str, Any]) -> PrivateState:
        return PrivateState(self.root, told["experiment"], self.settings.id)

    def _hello(self, told: Mapping[str, Any]) -> Reply:
        """Who this is, which the server judges; what comes of it must be read by servers of every format."""
        key = told.get("key")
        if isinstance(key, str) and NAME.fullmatch(key) and key != self.settings.id:
            log.error(OTHER_KEY, self.settings.id, key, key, key)
        me = {"client": self.settings.id, "version": VERSION, "format": FORMAT}
        return Reply(me | {"stages": self._state(told).stages()})

    def _describe(self, told: Mapping[str, Any]) -> Reply:
        check_format("the server", told)
        recipe = read_recipe(told.get("recipe"), hint=WHERE)
        if told.get("world") is not None:  # it is here before work, so that another model is found at once
            world = self._world(told)
            check_model(world, build_parts(world, self.settings.device))
        data = self._data(recipe, requests.number(told), self._state(told))
        if told.get("form") is not None:  # others have agreed on it already
            try:
                data.fitted(Form.read(told["form"]), None)
            except UserError as e:
                raise _DataError(str(e)) from None
        found: dict[str, Any] = {
            "form": asdict(data.form()),
            "normalize": data.normalize,
            "sizes": {split: data.size(split) for split in ("train", "validation", "test")},
        }
        if data.normalize == "standardize":
            found["moments"] = _told(data.moments())
        if data.normalize_targets:
            found["target_moments"] = _told(data.target_moments())
        return Reply(found)

    def _data(self, recipe: Recipe, number: int, state: PrivateState) -> LocalData:
        try:
            return local_data.load(self.settings, recipe, number, StoredSplit.read(state.folder / SPLIT))
        except (Exception, SystemExit) as e:  # of a function of one's own, anything
            raise _DataError(f"{type(e).__name__}: {e}") from e

    def _world(self, told: Mapping[str, Any]) -> World:
        """What is agreed on, as the server sends it."""
        if isinstance(told.get("world"), dict):
            check_format("the experiment", told["world"])  # before the rest of it is read
        return World.read(told.get("world"))

    # Work

    def _work(self, told: Mapping[str, Any], blobs: Sequence[bytes]) -> Reply:
        world = self._world(told)
        parts = build_parts(world, self.settings.device)
        check_model(world, parts)
        with warnings.catch_warnings():  # the server has said already what there is to say of a schedule
            warnings.simplefilter("ignore")
            schedule = parts.schedule()
        requests.check_work(told, len(blobs), schedule, parts.algorithm.welcome())
        dtype = next(iter(parts.initial.values())).dtype
        state = self._state(told)
        with _alone(state.folder), products(parts.training.arithmetic, parts.device):
            data = self._data(parts.recipe, requests.number(told), state)
            try:
                data = data.fitted(world.form, world.normalize(), world.normalize_targets())
            except UserError as e:
                raise _DataError(str(e)) from None
            if data.split is not None:  # now: the number of a client that is only described may change
                data.split.write(state.folder / SPLIT)
            return _Session(self.settings, world, parts, data.to(parts.device, dtype), state, told, blobs).played()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes of this client from working; who does is said in its own log."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder))
        except UserError as e:
            log.error("%s", e)
            raise UserError("another process is at work for this client") from None
        yield


class _DataError(Exception):
    """Something is wrong with the client's data, which the server must not be told."""


class _Session:
    """A request to work, on the way to its reply."""

    def __init__(
        self,
        settings: ClientSettings,
        world: World,
        parts: Parts,
        data: LocalData,
        state: PrivateState,
        told: Mapping[str, Any],
        blobs: Sequence[bytes],
    ) -> None:
        self.settings, self.world, self.parts, self.data, self.state = settings, world, parts, data, state
        self.told, self.number = told, requests.number(told)
        limit = max(wire.LIMIT, 16 * sum(t.numel() for t in parts.initial.values()))
        self.downs = [tree.moved(wire.unpack(blob, limit=limit), parts.device) for blob in blobs]
        self.augment = parts.training.augment != "none"

    def played(self) -> Reply:
        kept = self._kept()
        if kept is None:
            return Reply({"lost": True})
        told: dict[str, Any] = {}
        if (asked := self.told.get("evaluate")) is not None:
            told["scores"] = self._scores(self._ready(kept, asked["down"]), asked)
        upload: Payload = {}
        plays = self.told.get("plays", [])
        for play in plays:
            stage = Stage(**play["stage"])
            rnd = Round(stage, float(play["lr"]))
            down = Download(self.downs[play["down"]]) if stage.down else Download()
            done = client_round(self.parts.algorithm, self.parts.task, self._train(), kept, down, rnd)
            new = {n: t for n, t in done.kept.items() if t is not kept.get(n)}
            work = {n: float(getattr(done.work, n)[0]) for n in ("flops", "dense_flops", "loss", "steps")}
            spent = told.get("work", {})
            told["work"] = work | {n: work[n] + spent.get(n, 0.0) for n in ("flops", "dense_flops")}
            if broken := admission.not_finite(done.work.loss, done.upload, new):
                told["work"] |= {"loss": 0.0, "steps": 0.0}
                if play is plays[-1] and "close" not in self.told:
                    return Reply(told | {"diverged": broken[0]})
                continue  # a session made up for: as in a simulation the client goes on with what it had
            if (judged := play.get("judged")) is not None:
                payload, algorithm = tree.received(down, 1), self.parts.algorithm
                own = algorithm.after_training(done.kept, done.local, payload, rnd)
                sent = algorithm.downloaded_model(kept, payload, rnd)
                around = {"before": algorithm.personal(kept, payload) if sent is None else sent}
                if (trained := algorithm.personalised_model(done.kept, done.local, payload, rnd)) is not None:
                    around["after"] = trained
                tested = {n: _or_none(self._test(self._predicting(m, payload))) for n, m in around.items()}
                told["judged"] = self._scores(self._predicting(own, payload), judged) | tested
            kept, upload = done.kept, done.upload
        blob = b""
        if plays:
            position = int(plays[-1]["position"])
            if Stage(**plays[-1]["stage"]).up:
                blob = wire.pack(tree.row_of(upload, 0), stage=position, examples=self.data.size("train"))
            self.state.save(position, kept, acknowledged=int(self.told["acknowledged"]))
            last_stage = plays[-1]["stage"]
            log.info("stage %d (round %d, %s) played", position, last_stage["number"], last_stage["phase"])
        if (last := self.told.get("close")) is not None:
            ready = self._ready(kept, last["down"])
            told["scores"] = self._scores(ready, last)
            write_model(
                self.state.folder / MODEL, self.settings.id, self.world, ready, told["scores"], self.parts.model
            )
            log.info("the model is in %s", self.state.folder / MODEL)
        return Reply(told, blob)

    def _kept(self) -> Params | None:
        """What the client holds, as far as the server knows of it; None where it is lost."""
        ids, algorithm = torch.tensor([self.number]), self.parts.algorithm
        begin = self.told["begin"]
        if begin == "fresh":
            return algorithm.init_clients(self.parts.initial, ids)
        if begin == "newcomer":
            kept = algorithm.newcomer(self.parts.initial, Download(self.downs[self.told["given"]]), ids)
            check_kept(algorithm, "newcomer", kept)
            return kept
        found = self.state.load(int(self.told["acknowledged"]))
        return None if found is None else {n: t.to(self.parts.device) for n, t in found.items()}

    def _train(self) -> Examples:
        return self.data.examples("train", self.number, augment=self.augment)

    def _unchanged(self, split: Split) -> Examples:
        """The client's data without augmentation."""
        return self.data.examples(split, self.number)

    # Scores

    def _ready(self, kept: Params, down: int) -> Params:
        payload = tree.received(Download(self.downs[down]), 1)
        return self._predicting(self.parts.algorithm.personal(kept, payload), payload)

    def _predicting(self, own: Params, payload: Payload) -> Params:
        return deployed(self.parts.algorithm, self.parts.task, own, payload, self._unchanged)

    def _scores(self, ready: Params, asked: Mapping[str, Any]) -> dict[str, Any]:
        """How good this model, and the common one where it was sent, are on the client's data."""
        found: dict[str, Any] = {"own": self._test(ready), "finite": bool(finite(ready)[0])}
        if self.data.size("validation"):
            found["validation"] = self._mean(self._of(ready, "validation"))
        if asked.get("train_loss"):
            each = self._of(ready, "train", Metric(self.parts.task.criterion))
            found["train_loss"] = float(each.double().mean())
        if "down" in asked:
            common = self.parts.algorithm.common(tree.received(Download(self.downs[asked["down"]]), 1))
            if common is not None:
                found["common"] = self._mean(self._of(common, "test", common=True))
        return {n: _or_none(v) if isinstance(v, float) else v for n, v in found.items()}

    def _test(self, ready: Params) -> float:
        return self._mean(self._of(ready, "test"))

    def _mean(self, each: Tensor) -> float:
        return float(self.parts.task.metric.of_client(each.cpu()))

    def _of(self, ready: Params, split: Split, metric: Metric | None = None, *, common: bool = False) -> Tensor:
        task = self.parts.task if metric is None else replace(self.parts.task, metric=metric)
        algorithm = self.parts.algorithm
        data = self.data.examples(split, self.number)
        data = data if metric is None else data.in_training_units()  # a loss is as in training
        if common:
            return scores(algorithm.common_answer, task, ready, data, ACTIVATIONS)[0]
        return client_scores(algorithm, task, ready, data, self.parts.recipe.evaluation, ACTIVATIONS)[0]


def _told(moments: Moments) -> dict[str, Any]:
    """Sums of a client's data as JSON has them."""
    return {"count": moments.count, "mean": moments.mean.tolist(), "squares": moments.squares.tolist()}


def _or_none(value: float) -> float | None:
    """A number as JSON has it."""
    return value if math.isfinite(value) else None
