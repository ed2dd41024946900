"""A run as frozen dataclasses: TOML in, objects out; what is unknown or impossible is refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import re
import tomllib
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from personafl.algorithms import ALGORITHMS
from personafl.core.algorithm import Algorithm
from personafl.core.types import BufferPolicy, Criterion, Evaluation, Training
from personafl.data import DATASETS, PARTITIONS
from personafl.data.corrupted import CORRUPTED, PER_CLIENT
from personafl.data.corruptions import CORRUPTIONS, SEVERITIES
from personafl.data.partition import KNOW_THEIR_CLIENTS, REPEATED
from personafl.data.pfllib import is_pfllib
from personafl.evaluation.metrics import LOSSES, METRICS
from personafl.models import MODELS

T = TypeVar("T")


class ConfigError(ValueError):
    """A recipe or a command line that cannot be run, in one line."""


@dataclass(frozen=True)
class Data:
    """Which data, and who holds what."""

    dataset: str = "digits"
    partition: str = "dirichlet"
    num_clients: int = 0  # 0: all of a natural partition or one per source, else 20
    alpha: float = 0.3
    classes_per_client: int = 2
    samples_per_class: int = 0  # of each of a client's classes, for shards; 0: all
    samples_per_client: int = 0  # for dominant; 0: 600, or fewer where those do not suffice
    uniform_share: float = 0.2  # of them, over all classes alike
    official_test: Literal["pooled", "dealt", "global"] = "pooled"  # what becomes of the test part data came with
    test_samples_per_class: int = 0  # samples_per_class of a test part that is dealt
    test_samples_per_client: int = 0  # samples_per_client of it; 0: half of those for training, or fewer as fits
    test_share: float = 0.25
    validation_share: float = 0.0
    unseen_ratio: float = 0.0
    corruption: str = "none"  # of the images themselves: one for all, or one per client
    corruption_severity: int = 5

    @property
    def from_file(self) -> bool:
        """Whether a file says who holds what."""
        return self.partition.endswith(".json")


@dataclass(frozen=True)
class ModelChoice:
    """Which network; `auto` is the data set's default."""

    name: str = "auto"
    head: str = ""  # pattern of parameter names; empty: the last linear layer
    buffers: BufferPolicy = "average"


@dataclass(frozen=True)
class Method:
    """One entry of a comparison."""

    label: str
    name: str
    algorithm: Algorithm


@dataclass(frozen=True)
class Recipe:
    """A whole run."""

    name: str
    data: Data = field(default_factory=Data)
    model: ModelChoice = field(default_factory=ModelChoice)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    algorithms: tuple[Method, ...] = ()

    def with_seed(self, seed: int) -> Recipe:
        return dataclasses.replace(self, training=dataclasses.replace(self.training, seed=seed))


_SECTIONS: dict[str, type[Any]] = {"data": Data, "model": ModelChoice, "training": Training, "evaluation": Evaluation}

_OF_TEST_PARTS = ("test_samples_per_class", "test_samples_per_client")

# What other frameworks call our keys.
_ELSEWHERE = {
    "global_rounds": "num_rounds",
    "rounds": "num_rounds",
    "n_rounds": "num_rounds",
    "num_server_rounds": "num_rounds",
    "global_epoch": "num_rounds",
    "local_learning_rate": "lr",
    "learning_rate": "lr",
    "local_epoch": "local_epochs",
    "epochs": "local_epochs",
    "lbs": "batch_size",
    "batch": "batch_size",
    "fraction_fit": "join_ratio",
    "fraction_train": "join_ratio",
    "client_participation": "join_ratio",
    "eligible_perc": "join_ratio",
    "n_clients": "num_clients",
    "client_num": "num_clients",
    "dirichlet_alpha": "alpha",
    "eval_gap": "eval_every",
    "test_interval": "eval_every",
    "learning_rate_decay_gamma": "lr_decay",
    "class_per_client": "classes_per_client",
    "model_name": "name",
}


def recipes() -> dict[str, str]:
    """The shipped recipes: name to text."""
    folder = resources.files("personafl") / "recipes"
    return {
        f.name[: -len(".toml")]: f.read_text() for f in sorted(folder.iterdir(), key=str) if f.name.endswith(".toml")
    }


def load(recipe: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by path, by shipped name or as a dict (None: the demo), with `section.key=value` overrides."""
    if isinstance(recipe, Mapping):
        name, raw = "recipe", dict(recipe)
    else:
        name, raw = _read(str(recipe or "demo"))
    made = _build(name, _overridden(raw, overrides))
    left = _unused(made)
    ignored = [key for key in dict(map(_pair, overrides)) if key in left]
    if ignored:
        warnings.warn(f"without effect here: {', '.join(f'{key} ({left[key]})' for key in ignored)}", stacklevel=2)
    return made


def _unused(recipe: Recipe) -> dict[str, str]:
    """The settings that have no effect in a recipe, as `section.key`, and why."""
    data, out = recipe.data, dict[str, str]()
    if data.from_file:
        named = {"num_clients", "official_test", "test_share", "validation_share", "unseen_ratio", *_OF_TEST_PARTS}
        used, why = frozenset[str](), "the partition file says who holds what"
    else:
        used, why = PARTITIONS[data.partition].uses, f"{data.partition} does not use it"
        named = {"num_clients"} if data.partition in KNOW_THEIR_CLIENTS and not data.num_clients else set()
        if data.official_test == "dealt":
            out["data.test_share"] = "the test part is dealt"
        else:
            out |= {f"data.{n}": "goes with official_test=dealt" for n in _OF_TEST_PARTS}
    rules = set().union(*(r.uses for r in PARTITIONS.values()))
    out = {f"data.{n}": why for n in sorted(named | (rules - used))} | out
    if data.corruption == "none":
        out["data.corruption_severity"] = "data.corruption=none"
    if not recipe.evaluation.corruptions:
        out["evaluation.severities"] = "no evaluation.corruptions"
    return out


def _read(recipe: str) -> tuple[str, dict[str, Any]]:
    shipped = recipes()
    if recipe in shipped:
        return recipe, tomllib.loads(shipped[recipe])
    path = Path(recipe)
    if not path.is_file():
        raise ConfigError(f"recipe {recipe!r}: no such file, and {unknown('shipped recipe', recipe, shipped)}")
    try:
        return path.stem, tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"recipe {recipe}: not valid TOML: {e}") from None


def _overridden(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    raw = {k: dict(v) if isinstance(v, Mapping) else v for k, v in raw.items()}
    methods = [dict(m) for m in raw.get("algorithms", [])]
    before = raw.get("data", {}).get("partition")
    pairs = [_pair(o) for o in overrides]
    for key, value in pairs:  # which methods there are comes first, so that their settings find them
        if key == "algorithms":
            wanted = [v.strip() for v in value.split(",") if v.strip()]
            known = {m.get("label", m.get("name")): m for m in methods}
            methods = [dict(known.get(w, {"name": w})) for w in wanted]
    for key, value in pairs:
        if key == "algorithms":
            continue
        section, _, name = key.rpartition(".")
        if section in _SECTIONS:
            raw.setdefault(section, {})[name] = _literal(value)
            continue
        mine = [m for m in methods if section in (m.get("label"), m.get("name"))]
        if not mine and "." in section:  # a setting of what fills a slot: fedphp.inherit.transfer
            section, _, slot = section.rpartition(".")
            mine = [_opened(m, slot) for m in methods if section in (m.get("label"), m.get("name"))]
        if not section or not mine:
            labels = [str(m.get("label", m.get("name"))) for m in methods]
            raise ConfigError(
                f"override {key}={value}: {section or key!r} is neither a section ({', '.join(_SECTIONS)}) "
                f"nor a method of this run ({', '.join(labels)})"
            )
        for m in mine:
            m[name] = _literal(value)
    _follow_clients(raw.get("data", {}), before, dict(pairs))
    return raw | {"algorithms": methods}


def _follow_clients(data: dict[str, Any], before: object, asked: Mapping[str, str]) -> None:
    """Take the clients of a folder, and all that data know, where nothing else is asked for.

    `before` is the recipe's own partition, `asked` are the overrides.
    """
    name = data.get("dataset")
    chosen = "data.dataset" in asked or "data.partition" in asked
    folder = isinstance(name, str) and name not in DATASETS and Path(name).is_dir()
    if folder and "data.partition" not in asked and ("data.dataset" in asked or before is None):
        data["partition"] = "natural"
        if "data.official_test" not in asked and ("data.dataset" in asked or "official_test" not in data):
            data["official_test"] = "dealt" if is_pfllib(str(name)) else "pooled"
    now = data.get("partition")
    if now in KNOW_THEIR_CLIENTS and before != now and "data.num_clients" not in asked and chosen:
        data.pop("num_clients", None)


def _opened(entry: dict[str, Any], slot: str) -> dict[str, Any]:
    """What fills a slot of a method, as a table that can be written to."""
    held = entry.get(slot, {"name": "fedavg"} if slot == "base" else {})
    entry[slot] = dict(held) if isinstance(held, Mapping) else {"name" if slot == "base" else "transfer": held}
    opened: dict[str, Any] = entry[slot]
    return opened


def _pair(override: str) -> tuple[str, str]:
    key, eq, value = override.partition("=")
    if not eq or not key:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    return key.strip(), value.strip()


def _literal(text: str) -> Any:
    """A value as TOML would read it; bare words are strings, commas make a list."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        pass
    if "," in text:
        return [_literal(t) for t in text.split(",")]
    try:
        return float(text)  # .5 is no TOML
    except ValueError:
        return text


def _build(name: str, raw: Mapping[str, Any]) -> Recipe:
    for section in raw:
        if section not in (*_SECTIONS, "algorithms"):
            raise ConfigError(f"section [{section}]: {unknown('section', section, (*_SECTIONS, 'algorithms'))}")
    made: dict[str, Any] = {}
    for section, cls in _SECTIONS.items():
        values = raw.get(section, {})
        if not isinstance(values, Mapping):
            raise ConfigError(f"[{section}] must be a table of settings, it is {values!r}")
        made[section] = _section(section, cls, values)
    if "num_clients" in raw.get("data", {}) and made["data"].num_clients < 1:
        raise ConfigError(f"data.num_clients={made['data'].num_clients}: must be at least 1")
    if made["data"].dataset not in DATASETS and Path(made["data"].dataset).is_dir():
        made["data"] = dataclasses.replace(made["data"], dataset=_folder(made["data"].dataset))
    _check(made["data"], made["model"], made["training"], made["evaluation"])
    if made["evaluation"].when == "after_local":
        made["evaluation"] = dataclasses.replace(made["evaluation"], clients="selected")
    if made["data"].dataset in CORRUPTED and "corruption" not in raw.get("data", {}):
        made["data"] = dataclasses.replace(made["data"], corruption=PER_CLIENT)
    if made["data"].partition == "dominant" and "classes_per_client" not in raw.get("data", {}):
        made["data"] = dataclasses.replace(made["data"], classes_per_client=3)  # FedPAC's
    knows = made["data"].partition in KNOW_THEIR_CLIENTS or made["data"].from_file
    if made["data"].num_clients == 0 and not knows:
        made["data"] = dataclasses.replace(made["data"], num_clients=20)
    entries = raw.get("algorithms", [])
    if not isinstance(entries, list) or not all(isinstance(m, Mapping) for m in entries):
        raise ConfigError("algorithms must be [[algorithms]] tables, each with a name")
    if not entries:
        raise ConfigError("no algorithms: add an [[algorithms]] table or algorithms=NAME,...")
    methods = tuple(method(m) for m in entries)
    labels = [m.label for m in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"algorithms: two methods are called {label!r}; give one of them another label")
    return Recipe(name, algorithms=methods, **made)


def _folder(name: str) -> str:
    """A folder's name that is seen to be one, also where the folder is not there."""
    return name if "/" in name or "\\" in name else f"./{name}"


def method(entry: Mapping[str, Any]) -> Method:
    """An `[[algorithms]]` table as an object."""
    if "name" not in entry:
        raise ConfigError(f"[[algorithms]] entry {dict(entry)}: it has no name")
    name = entry["name"]
    cls = algorithm_class(name)
    label = entry.get("label", name)
    if not isinstance(label, str) or not re.fullmatch(r"[\w.+ :-]+", label) or label.startswith("."):
        raise ConfigError(f"algorithms.label={label!r}: letters, digits and . _ - + : only, for it names a folder")
    settings = {k: v for k, v in entry.items() if k not in ("name", "label")}
    known = {f.name: f for f in cls.settings()}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"{label}.{key}={value!r}: {unknown('setting', key, known, f'of {name}')}")
        values[key] = _slot(f"{label}.{key}", value, hints[key])
    try:
        return Method(label.replace(":", "-"), name, cls(**values))
    except ValueError as e:
        raise ConfigError(f"{label}: {e}") from None


def _slot(where: str, value: Any, hint: Any) -> Any:
    """A setting that may itself be a table: a base method, or what fills a slot. A bare value is its first setting."""
    if hint is Algorithm:
        return method({"name": value} if isinstance(value, str) else value).algorithm
    kind = next((o for o in typing.get_args(hint) if dataclasses.is_dataclass(o)), None)
    if kind is None:
        return _typed(where, value, hint)
    if value in (None, "none"):
        return None
    if not isinstance(value, Mapping):
        value = {dataclasses.fields(kind)[0].name: value}
    try:
        return _section(where, typing.cast(type[Any], kind), value)
    except ValueError as e:
        raise e if isinstance(e, ConfigError) else ConfigError(f"{where}: {e}") from None


def algorithm_class(name: object) -> type[Algorithm]:
    """A registered method, or one's own as `package.module:Class`."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if isinstance(name, str) and ":" in name:
        cls = imported(name, "algorithm")
        if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
            raise ConfigError(f"algorithm {name!r}: that is not a subclass of personafl.Algorithm")
        return cls
    raise ConfigError(f"algorithm {name!r}: {unknown('algorithm', str(name), ALGORITHMS)}, or package.module:Class")


def imported(path: str, what: str) -> Any:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"{what} {path!r}: cannot be imported: {e}") from None


def criterion(name: str, known: Mapping[str, Criterion], what: str) -> Criterion:
    """A loss or metric by name or dotted path: outputs and targets to one number per example."""
    if name in known:
        return known[name]
    if ":" not in name:
        raise ConfigError(f"{what} {name!r}: {unknown(what, name, known)}, or package.module:function")
    found = imported(name, what)
    if not callable(found):
        raise ConfigError(f"{what} {name!r}: that is not a function")
    return typing.cast(Criterion, found)


def _section(section: str, cls: type[T], values: Mapping[str, Any]) -> T:
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in names:
            raise ConfigError(f"{section}.{key}={value!r}: {unknown('setting', key, sorted(names), f'of [{section}]')}")
    return cls(**{k: _typed(f"{section}.{k}", v, hints[k]) for k, v in values.items()})


def _typed(where: str, value: Any, hint: Any) -> Any:
    """The value as the type asks; whole numbers pass for real ones, nothing else is bent."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where}={value!r}: possible are {', '.join(map(str, args))}")
        return value
    if origin in (typing.Union, types.UnionType):
        for option in args:
            try:
                return _typed(where, value, option)
            except ConfigError:
                continue
        words = [str(a) for o in args for a in (typing.get_args(o) or ("a whole number" if o is int else o.__name__,))]
        raise ConfigError(f"{where}={value!r}: possible are {', '.join(words)}")
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_typed(where, v, args[0]) for v in items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}={value!r}: must be finite")
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        kind = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, str(hint))
        raise ConfigError(f"{where}={value!r}: must be {kind}")
    return value


def _check(data: Data, model: ModelChoice, training: Training, evaluation: Evaluation) -> None:
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
    if model.name != "auto" and model.name not in MODELS and ":" not in model.name:
        raise ConfigError(
            f"model.name={model.name!r}: {unknown('model', model.name, ('auto', *MODELS))}, or package.module:Class"
        )
    if data.corruption not in (possible := ("none", PER_CLIENT, *CORRUPTIONS)):
        raise ConfigError(f"data.corruption={data.corruption!r}: {unknown('corruption', data.corruption, possible)}")
    for kind in evaluation.corruptions:
        if kind not in ("all", *CORRUPTIONS):
            raise ConfigError(f"evaluation.corruptions={kind!r}: {unknown('corruption', kind, ('all', *CORRUPTIONS))}")
    criterion(training.loss, LOSSES, "loss")
    criterion(evaluation.metric, METRICS, "metric")
    bounds = [
        ("data.alpha", data.alpha, data.alpha > 0, "greater than 0"),
        ("data.classes_per_client", data.classes_per_client, data.classes_per_client >= 1, "at least 1"),
        ("data.samples_per_class", data.samples_per_class, data.samples_per_class >= 0, "0 (all) or more"),
        ("data.samples_per_client", data.samples_per_client, data.samples_per_client >= 0, "0 (as fits) or more"),
        ("data.uniform_share", data.uniform_share, 0 <= data.uniform_share <= 1, "in [0, 1]"),
        ("data.test_samples_per_class", (n := data.test_samples_per_class), n >= 0, "0 (all) or more"),
        ("data.test_samples_per_client", (n := data.test_samples_per_client), n >= 0, "0 (half, or as fits) or more"),
        ("data.test_share", data.test_share, 0 < data.test_share < 1, "between 0 and 1"),
        ("data.validation_share", data.validation_share, 0 <= data.validation_share < 1, "in [0, 1)"),
        ("data.unseen_ratio", data.unseen_ratio, 0 <= data.unseen_ratio < 1, "in [0, 1)"),
        ("data.corruption_severity", data.corruption_severity, data.corruption_severity in SEVERITIES, "1 to 5"),
        ("training.num_rounds", training.num_rounds, training.num_rounds >= 1, "at least 1"),
        ("training.join_ratio", training.join_ratio, 0 < training.join_ratio <= 1, "in (0, 1]"),
        ("training.local_epochs", training.local_epochs, training.local_epochs >= 1, "at least 1"),
        ("training.local_steps", training.local_steps, training.local_steps >= 0, "not negative"),
        ("training.batch_size", training.batch_size, training.batch_size >= 1, "at least 1"),
        ("training.lr", training.lr, training.lr > 0, "greater than 0"),
        ("training.lr_decay", training.lr_decay, 0 < training.lr_decay <= 1, "in (0, 1]"),
        ("training.momentum", training.momentum, 0 <= training.momentum < 1, "in [0, 1)"),
        ("training.weight_decay", training.weight_decay, training.weight_decay >= 0, "not negative"),
        ("training.grad_clip", training.grad_clip, training.grad_clip >= 0, "not negative"),
        ("training.server_lr", training.server_lr, training.server_lr > 0, "greater than 0"),
        ("training.seed", training.seed, 0 <= training.seed < 2**63, "between 0 and 2^63 - 1"),
        ("evaluation.eval_every", evaluation.eval_every, evaluation.eval_every >= 1, "at least 1"),
        ("evaluation.draws", evaluation.draws, evaluation.draws >= 1, "at least 1"),
        (
            "evaluation.degrees",
            list(evaluation.degrees),
            all(0 <= d <= 1 for d in evaluation.degrees),
            "shares in [0, 1]",
        ),
        ("evaluation.degrees", list(evaluation.degrees), len(evaluation.degrees) > 0, "at least one share"),
        (
            "evaluation.severities",
            list(evaluation.severities),
            len(evaluation.severities) > 0 and set(evaluation.severities) <= set(SEVERITIES),
            "some of 1 to 5",
        ),
        *(
            (f"evaluation.{n}", list(values), len(set(values)) == len(values), "named once each")
            for n in ("degrees", "corruptions", "severities", "rotations")
            for values in [getattr(evaluation, n)]
        ),
    ]
    kinds = list(evaluation.corruptions)
    bounds.append(("evaluation.corruptions", kinds, len(kinds) == 1 or "all" not in kinds, "all, or some kinds"))
    if isinstance(evaluation.clients, int):
        bounds.append(
            ("evaluation.clients", evaluation.clients, evaluation.clients >= 1, "all, selected or at least 1")
        )
    for where, value, fine, must in bounds:
        if not fine:
            raise ConfigError(f"{where}={value}: must be {must}")
    if evaluation.when == "after_local" and isinstance(evaluation.clients, int):
        raise ConfigError(
            f"evaluation.clients={evaluation.clients}: after local training only those selected have something to score"
        )
    if data.official_test == "dealt" and data.partition not in REPEATED and not data.from_file:
        raise ConfigError(
            f"data.official_test='dealt': {data.partition} cannot deal a test part by the same rule; "
            f"possible are {', '.join(REPEATED)}"
        )
    if data.official_test != "dealt" and data.test_share + data.validation_share >= 1:
        raise ConfigError(
            f"data.test_share={data.test_share} + validation_share={data.validation_share} leave no training data"
        )


def unknown(what: str, given: str, possible: Sequence[str] | Mapping[str, Any], where: str = "") -> str:
    """`no such setting of [training]; did you mean num_rounds?`, or what was possible."""
    names = list(possible)
    elsewhere = _ELSEWHERE.get(given.lower())
    near = [elsewhere] if elsewhere in names else difflib.get_close_matches(given, names, 1, 0.6)
    guess = f"; did you mean {near[0]}?" if near else ";"
    return f"no such {what}{' ' + where if where else ''}{guess} possible are {', '.join(names)}"


# Out again


def anchored(recipe: Recipe) -> Recipe:
    """The recipe with the place of data of one's own written out, so that it means the same from anywhere."""
    name = recipe.data.dataset
    if name in DATASETS or (":" in name and not Path(name).exists()):
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, dataset=str(Path(name).resolve())))


def dump(recipe: Recipe) -> str:
    """The resolved recipe as TOML: everything that was used, nothing that was not."""
    skip = {*_unused(recipe), *(() if recipe.model.head else ("model.head",))}
    lines = []
    for section in _SECTIONS:
        values = dataclasses.asdict(getattr(recipe, section))
        kept = {k: v for k, v in values.items() if f"{section}.{k}" not in skip}
        lines += [f"[{section}]", *(f"{k} = {_toml(v)}" for k, v in kept.items()), ""]
    for m in recipe.algorithms:
        lines += ["[[algorithms]]", f"name = {_toml(m.name)}", f"label = {_toml(m.label)}"]
        lines += [f"{k} = {_toml(v)}" for k, v in settings(m.algorithm).items()] + [""]
    return "\n".join(lines)


def settings(algorithm: Algorithm) -> dict[str, Any]:
    """A method's own settings as plain values; what is not set (no inherited model) is left out."""
    out: dict[str, Any] = {}
    for f in algorithm.settings():
        value = getattr(algorithm, f.name)
        if isinstance(value, Algorithm):
            out[f.name] = {"name": name_of(value), **settings(value)}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            out[f.name] = dataclasses.asdict(value)
        elif value is not None:
            out[f.name] = value
    return out


def name_of(algorithm: Algorithm) -> str:
    """What a recipe calls a method."""
    cls = type(algorithm)
    registered = next((n for n, c in ALGORITHMS.items() if c is cls), None)
    return registered or f"{cls.__module__}:{cls.__qualname__}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return repr(value)
