"""Whether a recipe can be run: one function per section, one line per rule."""

from __future__ import annotations

from typing import Any

from personafl.config.names import ConfigError, check_criterion, unknown
from personafl.config.recipe import Data, ModelChoice
from personafl.core.optim import BOUNDS
from personafl.core.types import Evaluation, Training
from personafl.data import DATASETS, PARTITIONS
from personafl.data.client_corruption import PER_CLIENT
from personafl.data.corruptions import CORRUPTIONS, SEVERITIES
from personafl.data.partition import deal_test_parts, declared_settings
from personafl.evaluation import metrics
from personafl.evaluation.metrics import LOSSES, METRICS
from personafl.models import MODELS


def check(data: Data, model: ModelChoice, training: Training, evaluation: Evaluation) -> None:
    """Refuse the first setting that names what there is not, is out of its bounds or contradicts another."""
    _data(data)
    _model(model)
    _training(training)
    _evaluation(evaluation)


def _data(data: Data) -> None:
    known = data.dataset in DATASETS or any(c in data.dataset for c in ":/\\") or data.dataset.endswith(".npz")
    if not known:
        raise ConfigError(
            f"data.dataset={data.dataset!r}: {unknown('data set', data.dataset, DATASETS)}, or a folder with a file "
            "per client, or a .npz file with x, y and optionally clients, or package.module:function"
        )
    if data.partition not in PARTITIONS and not data.from_file:
        raise ConfigError(
            f"data.partition={data.partition!r}: {unknown('partition', data.partition, PARTITIONS)}, "
            "or a .json file that personafl partition --save wrote"
        )
    if data.corruption not in (possible := ("none", PER_CLIENT, *CORRUPTIONS)):
        raise ConfigError(f"data.corruption={data.corruption!r}: {unknown('corruption', data.corruption, possible)}")
    declared = declared_settings(data.partition)
    for key, value in data.partition_settings.items():
        try:
            declared[key].check(value)
        except ValueError as e:
            raise ConfigError(f"data.{e}") from None
    rules = [
        ("test_share", 0 < data.test_share < 1, "between 0 and 1"),
        ("validation_share", 0 <= data.validation_share < 1, "in [0, 1)"),
        ("unseen_ratio", 0 <= data.unseen_ratio < 1, "in [0, 1)"),
        ("corruption_severity", data.corruption_severity in SEVERITIES, "1 to 5"),
    ]
    _hold("data", data, rules)
    if data.official_test == "dealt" and data.partition not in deal_test_parts() and not data.from_file:
        raise ConfigError(
            f"data.official_test='dealt': {data.partition} cannot deal a test part by the same rule; "
            f"possible are {', '.join(deal_test_parts())}"
        )
    if data.official_test != "dealt" and data.test_share + data.validation_share >= 1:
        raise ConfigError(
            f"data.test_share={data.test_share} + validation_share={data.validation_share} leave no training data"
        )


def _model(model: ModelChoice) -> None:
    if model.name != "auto" and model.name not in MODELS and ":" not in model.name:
        raise ConfigError(
            f"model.name={model.name!r}: {unknown('model', model.name, ('auto', *MODELS))}, or package.module:Class"
        )


def _training(training: Training) -> None:
    check_criterion(training.loss, metrics.names(LOSSES), "loss")
    rules = [
        ("num_rounds", training.num_rounds >= 1, "at least 1"),
        ("join_ratio", 0 < training.join_ratio <= 1, "in (0, 1]"),
        ("local_epochs", training.local_epochs >= 1, "at least 1"),
        ("local_steps", training.local_steps >= 0, "not negative"),
        ("batch_size", training.batch_size >= 1, "at least 1"),
        *((name, fine(getattr(training, name)), must) for name, (fine, must) in BOUNDS.items()),
        ("lr_decay", 0 < training.lr_decay <= 1, "in (0, 1]"),
        ("server_lr", training.server_lr > 0, "greater than 0"),
        ("seed", 0 <= training.seed < 2**63, "between 0 and 2^63 - 1"),
    ]
    _hold("training", training, rules)


def _evaluation(evaluation: Evaluation) -> None:
    kinds, severities, clients = evaluation.corruptions, evaluation.severities, evaluation.clients
    for kind in kinds:
        if kind not in ("all", *CORRUPTIONS):
            raise ConfigError(f"evaluation.corruptions={kind!r}: {unknown('corruption', kind, ('all', *CORRUPTIONS))}")
    check_criterion(evaluation.metric, metrics.names(METRICS), "metric")
    rules = [
        ("eval_every", evaluation.eval_every >= 1, "at least 1"),
        ("draws", evaluation.draws >= 1, "at least 1"),
        ("degrees", all(0 <= d <= 1 for d in evaluation.degrees), "shares in [0, 1]"),
        ("degrees", len(evaluation.degrees) > 0, "at least one share"),
        ("severities", len(severities) > 0 and set(severities) <= set(SEVERITIES), "some of 1 to 5"),
        ("degrees", _distinct(evaluation.degrees), "named once each"),
        ("corruptions", _distinct(kinds), "named once each"),
        ("severities", _distinct(severities), "named once each"),
        ("rotations", _distinct(evaluation.rotations), "named once each"),
        ("corruptions", len(kinds) == 1 or "all" not in kinds, "all, or some kinds"),
        ("clients", not isinstance(clients, int) or clients >= 1, "all, selected or at least 1"),
    ]
    _hold("evaluation", evaluation, rules)
    if evaluation.when == "after_local" and isinstance(clients, int):
        raise ConfigError(
            f"evaluation.clients={clients}: after local training only those selected have something to score"
        )


def _distinct(values: tuple[object, ...]) -> bool:
    return len(set(values)) == len(values)


def _hold(section: str, settings: Any, rules: list[tuple[str, bool, str]]) -> None:
    """Each rule: a setting, whether it is as it must be, and what it must be."""
    for key, fine, must in rules:
        value = getattr(settings, key)
        if not fine:
            raise ConfigError(f"{section}.{key}={list(value) if isinstance(value, tuple) else value}: must be {must}")
