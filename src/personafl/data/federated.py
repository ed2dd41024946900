"""Which client holds which rows of a data set, and the split of each client into train, validation and test."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import rng, tree
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.normalization import Normalization
from personafl.core.types import Examples
from personafl.data.dataset import Source
from personafl.data.ragged import Indices, Ragged, SharedRows, spans

Split = Literal["train", "validation", "test"]
Place = Literal["auto", "device", "host"]
LAZY_FROM = 20_000  # from so many clients on, splits are drawn when they are asked for


@dataclass(frozen=True)
class LazySplit:
    """A split of very many clients: what each holds of it is drawn when asked for, as `Ragged` has it."""

    rows: Ragged  # of each client, in all splits that are drawn
    split: Split
    seed: int
    shares: tuple[float, float]  # for testing, for validation
    offsets: Tensor  # [clients + 1] int64, by arithmetic
    device: torch.device = torch.device("cpu")  # of what is drawn

    @classmethod
    def of(cls, held: Ragged, seed: int, shares: tuple[float, float]) -> dict[Split, LazySplit]:
        """The three splits, each client's size checked."""
        test, validation = (share_sizes(share, held.sizes) for share in shares)
        train = held.sizes - test - validation
        if (train < 1).any():
            client = int((train < 1).argmax())
            raise UserError(f"client {client} {too_few(int(held.sizes[client]), *shares)}; use fewer clients")
        sizes: dict[Split, Indices] = {"train": train, "validation": validation, "test": test}
        return {
            split: cls(held, split, seed, shares, torch.from_numpy(np.concatenate([[0], np.cumsum(n)])))
            for split, n in sizes.items()
        }

    def to(self, device: torch.device) -> LazySplit:
        return dataclasses.replace(self, device=device)

    def lengths(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(spans(self.offsets, ids)[1])

    def client(self, id: int) -> Indices:
        """The rows of one client."""
        return self.all_splits(id)[self.split]

    def all_splits(self, id: int) -> dict[Split, Indices]:
        """The rows of one client in every split that is drawn."""
        return split_client(id, self.rows[id], self.seed, *self.shares)

    def padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of these clients `[C, M]`, padded with 0, and how many are real `[C]` (on the host)."""
        count = self.lengths(ids)
        out = np.zeros((len(ids), int(count.max())), np.int64)
        for row, client in zip(out, ids.tolist(), strict=True):
            mine = self.client(client)
            row[: len(mine)] = mine
        return tree.sent(torch.from_numpy(out), self.device), count

    def materialize(self) -> Ragged:
        """The rows of every client."""
        return Ragged.of([self.client(c) for c in range(len(self.rows))]).to(self.device)


@dataclass(frozen=True, eq=False, repr=False)
class Federation(Displayed):
    """A data set divided over clients; those with very many draw a client's splits when it is asked for."""

    source: Source
    splits: Mapping[Split, Ragged | LazySplit | SharedRows]
    num_clients: int  # that take part; their ids are 0..num_clients - 1
    notes: dict[str, int] = field(default_factory=dict)  # what the partition reports, such as samples moved
    unseen: int = 0  # clients held out, whose ids follow
    official: Tensor | None = None  # [n] rows of a test part of no client, for the server's model

    @classmethod
    def build(
        cls,
        source: Source,
        parts: Sequence[Indices],
        seed: int,
        *,
        test_share: float = 0.25,
        validation_share: float = 0.0,
        notes: dict[str, int] | None = None,
        unseen: int = 0,
        tests: Sequence[Indices] | None = None,
        official: Indices | None = None,
    ) -> Federation:
        """Split every client's rows at random; each split that was asked for gets at least one row.

        The last `unseen` clients never take part: they are the newcomers of an evaluation. Where `tests` are given,
        they are the clients' test rows, and nothing is split off for testing. `official` are rows of no client; with
        `test_share=0` every client is tested on these.
        """
        if not 0 <= unseen < len(parts):
            raise UserError(f"{unseen} of {len(parts)} clients held out: at least one must take part")
        rest = None if official is None else torch.from_numpy(official)
        share = test_share if tests is None else 0.0
        common = SharedRows(rest, len(parts)) if tests is None and not test_share and rest is not None else None
        if tests is not None and not (given := Ragged.of(tests)).sizes.all():
            raise UserError(f"client {given.sizes.argmin()} has no test samples; use fewer clients")
        if len(parts) >= LAZY_FROM and source.groups is None:
            lazy: dict[Split, Ragged | LazySplit | SharedRows] = {
                **LazySplit.of(Ragged.of(parts), seed, (share, validation_share))
            }
            if tests is not None:
                lazy["test"] = Ragged.of(tests)
            elif common is not None:
                lazy["test"] = common
            return cls(source, lazy, len(parts) - unseen, notes or {}, unseen, rest)
        cut: dict[Split, list[Indices]] = {"train": [], "validation": [], "test": []}
        for client, rows in enumerate(parts):
            mine = split_client(client, rows, seed, share, validation_share, source.groups)
            mine |= {} if tests is None else {"test": tests[client]}
            for split, held in mine.items():
                cut[split].append(held)
        splits: dict[Split, Ragged | LazySplit | SharedRows] = {s: Ragged.of(p) for s, p in cut.items()}
        if common is not None:
            splits["test"] = common
        return cls(source, splits, len(parts) - unseen, notes or {}, unseen, rest)

    def _facts(self) -> dict[str, object]:
        sizes = self.sizes("train")
        parts = {split: n for split in ("train", "validation", "test") if (n := int(self.sizes(split).sum()))}
        if self.common_test is not None:
            parts["test"] = len(self.common_test)
        held_out = {"held_out": self.unseen} if self.unseen else {}
        each = f"{int(sizes.min())} to {int(sizes.max())}"
        return {"data": self.source.name, "clients": self.num_clients, **held_out, **parts, "train_per_client": each}

    @property
    def common_test(self) -> Tensor | None:
        """The rows that all clients are tested on; None where each has test rows of its own."""
        test = self.splits["test"]
        return test.values if isinstance(test, SharedRows) else None

    @property
    def everybody(self) -> int:
        """How many clients there are, those held out included."""
        return self.num_clients + self.unseen

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What clients are called, where each is a natural client that has a name; else nothing."""
        source, train = self.source, self.splits["train"]
        if source.names is None or source.clients is None:
            return ()
        held = train.rows if isinstance(train, LazySplit) else self.drawn("train")
        values, offsets = held.numpy()
        whose = source.clients[values]
        first = whose[offsets[:-1]]
        return tuple(source.names[i] for i in first) if (whose == first[held.holders()]).all() else ()

    def judged_by(self, split: Literal["test", "validation"]) -> Federation:
        """The same where these data take the place of clients' test data, and of a test part of nobody."""
        if split == "test":
            return self
        if not int(self.splits["validation"].offsets[-1]):
            raise UserError(
                "evaluation.split='validation': there are no validation data; set data.validation_share, such as 0.2"
            )
        splits = {**self.splits, "test": self.splits["validation"]}
        return dataclasses.replace(self, splits=splits, official=None)

    def to(self, device: torch.device, dtype: torch.dtype, data_on: Place = "auto") -> Federation:
        """The same on a device, its examples in the precision of the model (bytes stay bytes).

        On the host they stay as they are and go to the device minibatch by minibatch. `auto` leaves them there when
        they would take more than a quarter of the device's free memory.
        """
        s, x = self.source, self.source.x
        if data_on == "device" or (data_on == "auto" and not _too_large(x, device, dtype)):
            x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
        moved = {n: split.to(device) for n, split in self.splits.items()}
        rest = None if self.official is None else self.official.to(device)
        y = s.y.to(device, dtype) if s.y.is_floating_point() else s.y.to(device)
        s = dataclasses.replace(s, x=x, y=y)
        return dataclasses.replace(self, source=s, splits=moved, official=rest)

    def examples(self, split: Split, ids: Tensor, *, augment: bool = False) -> Examples:
        """The rows these clients hold in a split."""
        return self.examples_at(*self.splits[split].padded(ids), ids, augment=augment)

    def examples_at(self, rows: Tensor, count: Tensor, ids: Tensor, *, augment: bool = False) -> Examples:
        """These rows `[C, M]`, of which each client has `count` `[C]`."""
        s = self.source
        return Examples(s.x, s.y, rows, count, ids, augment, s.normalization, s.target_normalization)

    def with_normalization(self, normalization: Normalization | None) -> Federation:
        """The same with inputs that models see normalised."""
        return dataclasses.replace(self, source=dataclasses.replace(self.source, normalization=normalization))

    def with_target_normalization(self, normalization: Normalization | None) -> Federation:
        """The same with targets that training sees normalised; predictions are in the targets' own units."""
        source = dataclasses.replace(self.source, target_normalization=normalization)
        return dataclasses.replace(self, source=source)

    def rows(self, split: Split, client: int) -> Tensor:
        """The rows one client holds in a split, in their order."""
        return self.splits[split].padded(torch.tensor([client]))[0][0]

    def sizes(self, split: Split) -> Tensor:
        """How many rows each client holds: `[clients]`."""
        return self.splits[split].offsets.diff()

    def train_sizes(self, ids: Tensor) -> Tensor:
        """How many examples each of these clients trains on."""
        return self.splits["train"].lengths(ids)

    def drawn(self, split: Split) -> Ragged:
        """A split with every client's rows drawn; of a common test set, which is no client's, no rows."""
        found = self.splits[split]
        if isinstance(found, SharedRows):
            return Ragged.cut(np.zeros(0, np.int64), np.zeros(found.clients, np.int64))
        return found if isinstance(found, Ragged) else found.materialize()

    def materialize(self) -> Federation:
        """The same with all clients' rows drawn."""
        lazy = {n: split for n, split in self.splits.items() if isinstance(split, LazySplit)}
        if not lazy:
            return self
        one = next(iter(lazy.values()))  # they differ in which split they are of
        clients = [one.all_splits(c) for c in range(self.everybody)]
        drawn = {n: Ragged.of([c[s.split] for c in clients]).to(one.device) for n, s in lazy.items()}
        return dataclasses.replace(self, splits={**self.splits, **drawn})

    def class_counts(self) -> NDArray[np.int64]:
        """Examples per client and class over all splits: `[clients, K]`; one column where targets are no classes.

        A common test set is no client's.
        """
        labels, classes = self.source.labels, self.source.label_count
        out = np.zeros(self.everybody * classes, np.int64)
        for rows in self._held():
            out += np.bincount(rows.holders() * classes + labels[rows.numpy()[0]], minlength=len(out))
        return out.reshape(self.everybody, classes)

    def digest(self) -> str:
        """A short hash of who holds which rows in which split, or of all that decides it where it is drawn later."""
        h = hashlib.sha256()
        for rows in self._held():
            for part in rows.numpy():
                h.update(part.tobytes())
        if self.common_test is not None:
            h.update(b"common test" + self.common_test.cpu().numpy().tobytes())
        train = self.splits["train"]
        if isinstance(train, LazySplit):
            h.update(repr((train.seed, train.shares)).encode())
        return h.hexdigest()[:16]

    def _held(self) -> list[Ragged]:
        """The rows of each split, and only once those from which several are drawn."""
        splits = [self.splits[n] for n in sorted(self.splits)]
        drawn = [s for s in splits if isinstance(s, Ragged)]
        return drawn + [s.rows for s in splits if isinstance(s, LazySplit)][:1]


def _too_large(x: Tensor, device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        return False
    width = dtype.itemsize if x.is_floating_point() else x.element_size()
    return x.numel() * width > torch.cuda.mem_get_info(device)[0] / 4


def split_client(
    client: int,
    rows: Indices,
    seed: int,
    test_share: float,
    validation_share: float,
    groups: NDArray[np.int64] | None = None,
) -> dict[Split, Indices]:
    """A client's rows, drawn by its number: for testing, for validation, and the rest for training."""
    draw = rng.generator(seed, "split", client)
    test, validation = (max(1, round(share * len(rows))) if share else 0 for share in (test_share, validation_share))
    shuffled = draw.permutation(rows)
    if groups is not None and (wanted := [n for n in (test, validation) if n]):
        shuffled, ends = _by_group(client, rows, groups[rows], draw, wanted)
        test, validation = (*ends, 0)[:2] if test else (0, ends[0])
    end = test + validation
    if len(rows) - end < 1:
        raise UserError(f"client {client} {too_few(len(rows), test_share, validation_share)}; use fewer clients")
    return {"test": shuffled[:test], "validation": shuffled[test:end], "train": shuffled[end:]}


def too_few(size: int, test_share: float, validation_share: float) -> str:
    """What to say of a client of that size, behind its name."""
    parts = ["a training", *(["a validation"] if validation_share else []), *(["a test"] if test_share else [])]
    wanted = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"has {size} {'sample' if size == 1 else 'samples'}, too few for {wanted} part"


def _by_group(
    client: int, rows: Indices, groups: NDArray[np.int64], draw: np.random.Generator, wanted: list[int]
) -> tuple[Indices, list[int]]:
    """Rows in a random order of their groups, and the wanted sizes moved to the nearest end of a group."""
    names = np.unique(groups)
    pieces = [rows[groups == g] for g in draw.permutation(names)]
    ends = np.cumsum([len(p) for p in pieces])
    if len(names) <= len(wanted):
        raise UserError(
            f"client {client}: its {len(rows)} samples form {len(names)} groups that are never split apart, "
            f"too few for {len(wanted) + 1} parts; use fewer clients"
        )
    places: list[int] = []
    for i, end in enumerate(np.cumsum(wanted)):
        first, last = places[-1] + 1 if places else 0, len(wanted) - i  # one group is left for each part behind
        places.append(first + int(np.abs(ends[first:-last] - end).argmin()))
    return np.concatenate(pieces), np.diff(ends[places], prepend=0).tolist()


def share_sizes(share: float, sizes: Indices) -> Indices:
    """How many samples of clients of these sizes a share is: at least one, unless the share is 0."""
    asked: Indices = np.rint(share * sizes).astype(np.int64)
    return asked.clip(min=1) if share else asked
