"""A client's own data: a folder, a function of one's own, or a client of a data set that a recipe names, for trials."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl import config
from personafl.config import Recipe, components
from personafl.core.errors import UserError
from personafl.core.normalization import Normalization
from personafl.core.types import Examples, TaskName
from personafl.data import Source, custom, normalize
from personafl.data.client_data import ClientData, concatenate
from personafl.data.columns import Column, feature_places, name_features, unknown_category
from personafl.data.federated import Split, split_client
from personafl.data.normalize import Moments, Setting
from personafl.deployment.federation_spec import Form
from personafl.deployment.settings import ClientSettings
from personafl.deployment.stored_split import Shares, StoredSplit, digest_rows, divide

TRIAL = "recipe:"  # before the number of a client of the recipe's own data


@dataclass(frozen=True)
class LocalData:
    """One client's examples, and which of them are for what."""

    source: Source
    rows: Mapping[Split, Tensor]
    normalize: Setting  # what data.normalize means for them
    normalize_targets: bool  # what data.normalize_targets means for them
    split: StoredSplit | None = None  # to be stored before the rows are trained on; None: nothing new is drawn

    def size(self, split: Split) -> int:
        return len(self.rows[split])

    def form(self) -> Form:
        return Form.of(self.source)

    def moments(self) -> Moments:
        """What the common normalisation is made of."""
        return normalize.moments(self.source.x[self.rows["train"]])

    def target_moments(self) -> Moments:
        """What the common normalisation of targets is made of."""
        return normalize.moments(self.source.y[self.rows["train"]])

    def fitted(
        self, form: Form, normalization: Normalization | None, target_normalization: Normalization | None = None
    ) -> LocalData:
        """The same with the classes all clients agreed on, and normalised as agreed."""
        if why := self.form().unlike(form):
            raise UserError(f"its examples have {why}")
        source = _with_columns(self.source, form.columns)
        if source.class_names is not None and form.class_names is not None:
            number = {n: i for i, n in enumerate(form.class_names)}
            if missing := [n for n in source.class_names if n not in number]:
                raise UserError(f"its label {missing[0]!r} is none of those agreed on")
            place = torch.tensor([number[n] for n in source.class_names])
            source = dataclasses.replace(source, y=place[source.y], classes=form.classes, class_names=form.class_names)
        elif source.classes > form.classes:
            raise UserError(f"it has {source.classes} classes, {form.classes} were agreed on")
        source = dataclasses.replace(
            source,
            classes=form.classes,
            normalization=normalization,
            target_normalization=target_normalization,
        )
        return dataclasses.replace(self, source=source)

    def to(self, device: torch.device, dtype: torch.dtype) -> LocalData:
        """On a device, in the precision of the model."""
        s = self.source
        x, y = (t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in (s.x, s.y))
        rows = {split: r.to(device) for split, r in self.rows.items()}
        return dataclasses.replace(self, source=dataclasses.replace(s, x=x, y=y), rows=rows)

    def examples(self, split: Split, client: int, *, augment: bool = False) -> Examples:
        """A stack of one, of the client that has this number."""
        rows, s = self.rows[split], self.source
        count, ids = torch.tensor([len(rows)]), torch.tensor([client])
        return Examples(s.x, s.y, rows[None], count, ids, augment, s.normalization, s.target_normalization)


def _with_columns(source: Source, agreed: tuple[Column, ...] | None) -> Source:
    """The same examples with features for all categories that were agreed on."""
    if source.columns is None or agreed is None or source.columns == agreed:
        return source
    if unknown := unknown_category(source.columns, agreed):
        raise UserError(f"its column {unknown[0]!r} has the value {unknown[1]!r}, which is none of those agreed on")
    names = tuple(name_features(agreed))
    x = source.x.new_zeros(len(source.x), len(names))
    x[:, feature_places(source.columns, agreed)] = source.x
    return dataclasses.replace(source, x=x, columns=agreed, feature_names=names)


def load(settings: ClientSettings, recipe: Recipe, client: int, stored: StoredSplit | None = None) -> LocalData:
    """The data of a client, divided as the recipe says where they are not.

    Args:
        settings: Where the data are.
        recipe: The recipe of the experiment.
        client: The number of the client: its rows are divided as those of this client of a simulation.
        stored: How rows were divided before, which stay in their part.
    """
    if settings.data.startswith(TRIAL):
        return _of_recipe(settings.data, recipe)
    d = recipe.data
    missing: NDArray[np.bool_] | None = None
    if ":" in settings.data and not Path(settings.data).is_dir():
        source = _called(settings, recipe)
    else:
        source, missing = _folder(settings, recipe)
    source = source.as_task(recipe.training.task)
    every = np.arange(len(source.y))
    tests = None if source.test is None else every[source.test]
    held = every if source.test is None else every[~source.test]
    if not len(held) or (tests is not None and not len(tests)):
        raise UserError(f"{source.name}: no {'test' if len(held) else 'training'} samples")
    if tests is None and not d.test_share:
        raise UserError(f"{source.name}: no test samples, and with data.test_share=0 none are split off")
    shares = Shares(d.test_share if tests is None else 0.0, d.validation_share)
    split = stored
    if shares.test or shares.validation:
        digests = digest_rows(source, missing)
        cut, split = divide(client, held, digests, recipe.training.seed, shares, source.groups, stored, source.name)
    else:  # nothing is drawn, but rows are in the order of a simulation's
        cut = split_client(client, held, recipe.training.seed, 0.0, 0.0, source.groups)
    cut |= {} if tests is None else {"test": tests}
    rows = {part: torch.from_numpy(r) for part, r in cut.items()}
    chosen = normalize.settled(None, source) if d.normalize == config.AUTO else d.normalize
    normalizes_targets = normalize.normalizes_targets(d.normalize_targets, source.task, source.name)
    return LocalData(source, rows, chosen, normalizes_targets, None if split is stored else split)


def _of_recipe(name: str, recipe: Recipe) -> LocalData:
    number = name.removeprefix(TRIAL)
    data = components.source(recipe)
    chosen = components.settled_normalization(recipe, data).data
    plain = dataclasses.replace(
        recipe, data=dataclasses.replace(recipe.data, normalize="none", normalize_targets=False)
    )
    fed = components.federation(plain, data)
    if not number.isdecimal() or int(number) >= fed.everybody:
        raise UserError(f"client.data={name!r}: {data.name} is divided over clients 0..{fed.everybody - 1} here")
    splits: tuple[Split, ...] = ("train", "validation", "test")
    rows = {split: fed.rows(split, int(number)) for split in splits}
    keep = torch.cat(list(rows.values()))
    ends = np.cumsum([0, *(len(r) for r in rows.values())])
    mine = {split: torch.arange(ends[i], ends[i + 1]) for i, split in enumerate(splits)}
    source = dataclasses.replace(
        fed.source,
        x=fed.source.x[keep],
        y=fed.source.y[keep],
        clients=None,
        names=None,
        sources=None,
        groups=None,
        test=None,
    )
    return LocalData(source, mine, chosen.normalize, chosen.normalize_targets is True)


def _called(settings: ClientSettings, recipe: Recipe) -> Source:
    """What a function of one's own gives: (train, test), each examples and labels or a data set; or one of both."""
    make = config.imported(settings.data, "data of a client")
    if not callable(make):
        raise UserError(f"client.data={settings.data!r}: that is not a function")
    try:
        inspect.signature(make).bind()
        given: tuple[Any, ...] = ()
    except TypeError:
        given = (settings.id,)
    except ValueError:  # one that has no signature
        given = ()
    made = make(*given)
    try:
        return _converted(made, settings.id, recipe.training.task)
    except UserError as e:
        raise UserError(f"client.data={settings.data!r}: {e}") from None


def _converted(made: Any, client: str, task: TaskName | Literal["auto"]) -> Source:
    if isinstance(made, Source):
        return made
    if isinstance(made, Mapping) and set(made) == {"train", "test"}:
        made = made["train"], made["test"]
    if not isinstance(made, tuple) or len(made) != 2:
        raise UserError(f"gave {type(made).__name__}; expected (train, test), each (x, y) or a data set, or a Source")
    if all(isinstance(part, tuple) and len(part) == 2 for part in made):
        (x, y), (test_x, test_y) = ((np.asarray(a) for a in part) for part in made)
        components = [ClientData(client, x, y, False), ClientData(client, test_x, test_y, True)]
        return concatenate(client, components, task=task)
    return custom.datasets([made], [client], name=client, task=task)


def _folder(settings: ClientSettings, recipe: Recipe) -> tuple[Source, NDArray[np.bool_] | None]:
    """The data of a folder, and which of their values were missing."""
    d = recipe.data
    home = Path(settings.data)
    try:
        held = custom.read_client(home, label=d.label, missing=d.missing, image_size=d.image_size)
        return held.as_source(d.missing, recipe.training.task), held.missing()
    except UserError as e:
        raise UserError(f"client.data={settings.data!r}: {e}") from None
