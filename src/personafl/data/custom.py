"""One's own data as a `Source`: PyTorch data sets, Hugging Face partitions, a folder with a file per client.

Clients are numbered in the order they are given. Bytes are pixels and are scaled to [0, 1] for the model.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from personafl.core.errors import UserError
from personafl.data.client_data import ClientData, client_names, concatenate
from personafl.data.dataset import Array, Source, arrays
from personafl.data.pfllib import is_pfllib, pfllib, read_client_npz, to_pfllib

__all__ = ["convert", "datasets", "folder", "hugging_face", "open_folder", "pfllib", "to_pfllib"]

_LABELS = ("label", "labels", "fine_label", "y", "target")
_EXAMPLES = ("img", "image", "images", "pixels", "x", "features", "pixel_values")
_PLAIN = {"1": "L", "LA": "L", "P": "RGB", "RGBA": "RGB", "CMYK": "RGB"}  # modes of pictures, and what they become
_AT_ONCE = 1000  # rows of a table read together


def convert(made: Any, name: str) -> Source:
    """What a function of one's own gives: a `Source`, arrays (x, y[, clients]), or a list of clients' data sets."""
    if isinstance(made, Source):
        return made
    first = made[0] if isinstance(made, (list, tuple)) and made else None
    first = next(iter(first.values()), None) if isinstance(first, dict) else first
    first = first[0] if isinstance(first, tuple) and first else first
    if hasattr(made, "load_partition") or hasattr(first, "column_names"):
        return hugging_face(made, name=name)
    if isinstance(first, Dataset):
        return datasets(made, name=name)
    if isinstance(made, (list, tuple)) and len(made) in (2, 3):
        return arrays(*made, name=name)
    raise UserError(f"gave {type(made).__name__}; expected a Source, (x, y[, clients]) or a list of clients' data sets")


def datasets(parts: Sequence[Any], names: Sequence[str] | None = None, *, name: str = "datasets") -> Source:
    """A map-style data set per client, each item an example and its label, or a (training, test) pair of them.

    Every item is read once, so a random transform is drawn once. Pictures become bytes `[channels, height, width]`.
    """
    clients = (
        ClientData(client, *_items(f"{name}: client {client}{', test part' if test else ''}", data), test)
        for client, part in zip(client_names(names, len(parts)), parts, strict=True)
        for data, test in _halves(part)
    )
    return concatenate(name, clients)


def _halves(part: Any) -> list[tuple[Any, bool | None]]:
    """What a client holds: all of it, or its training and its test part."""
    if isinstance(part, Mapping):
        if set(part) != {"train", "test"}:
            raise UserError(f"a client's parts must be train and test, they are {', '.join(map(str, part))}")
        part = (part["train"], part["test"])
    pair = isinstance(part, tuple) and len(part) == 2 and all(hasattr(p, "__getitem__") for p in part)
    return [(part[0], False), (part[1], True)] if pair else [(part, None)]


def _items(where: str, data: Any) -> tuple[Array, Array]:
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UserError(f"{where}: {type(data).__name__} has no length or no numbered items; use a map-style data set")
    xs: list[Array] = []
    ys: list[Array] = []
    for i in range(len(data)):
        try:
            x, y = data[i]
        except (TypeError, ValueError) as e:
            raise UserError(f"{where}, item {i}: must be an example and its label: {e}") from None
        xs.append(_array(x, f"{where}, item {i}"))
        ys.append(_array(y, f"{where}, item {i}"))
        if xs[i].shape != xs[0].shape:
            raise UserError(f"{where}, item {i}: its shape is {xs[i].shape}, that of item 0 {xs[0].shape}")
        ys[i] = ys[i].reshape(()) if ys[i].size == 1 else ys[i]
        if ys[i].shape != ys[0].shape:
            raise UserError(f"{where}, item {i}: its label has shape {ys[i].shape}, that of item 0 {ys[0].shape}")
    if not xs:
        raise UserError(f"{where}: no examples")
    return np.stack(xs), np.stack(ys)


def _array(value: Any, where: str, *, rows_first: bool = False) -> Array:
    """An example as numbers; pictures, and arrays of their form, with channels first."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    picture = hasattr(value, "mode") and hasattr(value, "convert")
    if picture:
        value = value.convert(_PLAIN.get(value.mode, value.mode))
    try:
        found = np.asarray(value)
    except (TypeError, ValueError) as e:
        raise UserError(f"{where}: not an array: {e}") from None
    if found.dtype.kind not in "fiub":
        raise UserError(f"{where}: must be numbers, it is {type(value).__name__}")
    if not picture and not rows_first:
        return found
    return found[None] if found.ndim == 2 else np.ascontiguousarray(np.moveaxis(found, -1, 0))


def hugging_face(
    parts: Any, image: str = "", label: str = "", *, names: Sequence[str] | None = None, name: str = "hugging-face"
) -> Source:
    """Partitions of a Hugging Face data set, or a Flower `FederatedDataset`, without either package being needed.

    A client is a `datasets.Dataset`, or {"train": ..., "test": ...}. `image` and `label` name its columns; otherwise
    they are found by their usual names. Of a `FederatedDataset` train and, where it is divided, test are taken.
    """
    clients = _loaded(parts) if hasattr(parts, "load_partition") else list(parts)
    sizes: set[int] = set()

    def read() -> Iterator[ClientData]:
        for client, part in zip(client_names(names, len(clients)), clients, strict=True):
            for data, test in _halves(part):
                where = f"{name}: client {client}{', test part' if test else ''}"
                x, y = _column(where, data, image, _EXAMPLES, "image"), _column(where, data, label, _LABELS, "label")
                kinds = getattr(data, "features", None) or {}
                sizes.add(int(getattr(kinds.get(y), "num_classes", 0) or 0))
                yield ClientData(client, *_columns(where, data, x, y, type(kinds.get(x)).__name__ == "Image"), test)

    held = list(read())
    return concatenate(name, held, classes=max(sizes, default=0))


def _loaded(federated: Any) -> list[Any]:
    """The partitions of a `FederatedDataset`, or of a single partitioner."""
    made = getattr(federated, "partitioners", None)
    if not made:
        return [federated.load_partition(i) for i in range(federated.num_partitions)]
    train = "train" if "train" in made else next(iter(made))
    count = made[train].num_partitions
    both = train == "train" and "test" in made and made["test"].num_partitions == count
    if both:
        return [{s: federated.load_partition(i, s) for s in ("train", "test")} for i in range(count)]
    return [federated.load_partition(i, train) for i in range(count)]


def _column(where: str, data: Any, given: str, usual: Sequence[str], what: str) -> str:
    there = list(getattr(data, "column_names", None) or [])
    if given and given not in there:
        raise UserError(f"{where}: no column {given!r}; it has {', '.join(there) or 'none'}")
    found = given or next((n for n in usual if n in there), "")
    if not found:
        raise UserError(f"{where}: no column called {', '.join(usual)}; give {what}=, one of {', '.join(there)}")
    return found


def _columns(where: str, data: Any, x: str, y: str, pictures: bool) -> tuple[Array, Array]:
    xs: list[Array] = []
    ys: list[Array] = []
    for start in range(0, len(data), _AT_ONCE):
        rows = data[start : start + _AT_ONCE]
        for value in rows[x]:
            at = f"{where}, row {len(xs)}, column {x}"
            xs.append(_array(value, at, rows_first=pictures and not isinstance(value, Tensor)))
            if xs[-1].shape != xs[0].shape:
                raise UserError(f"{at}: its shape is {xs[-1].shape}, that of row 0 {xs[0].shape}")
        ys += [_array(v, f"{where}, row {start + i}, column {y}") for i, v in enumerate(rows[y])]
    if not xs:
        raise UserError(f"{where}: no examples")
    return np.stack(xs), np.stack(ys)


# Folders


def open_folder(path: str | Path) -> Source:
    """A folder of one's own: PFLlib's layout if it has train/ and test/, else a file per client."""
    home = Path(path)
    return pfllib(home) if is_pfllib(home) else folder(home)


def folder(path: str | Path) -> Source:
    """A file per client, named after it: .npz, .pt or .safetensors with x and y, or .csv with a line of column names.

    The label of a .csv is in its column label, y or target, or else in its last. Nothing is unpickled.
    """
    home = Path(path)
    if home.suffix.lower() in _READERS and not home.is_dir():
        raise UserError(f"{home}: a {home.suffix} file is one client's and belongs in a folder; name that folder")
    if not home.is_dir():
        raise UserError(f"{home}: no such folder")
    files = [p for p in home.iterdir() if p.suffix.lower() in _READERS and not p.name.startswith(".") and p.is_file()]
    if not files:
        raise UserError(f"{home}: no client's file in it; possible are {', '.join(_READERS)}, or train/ and test/")
    files.sort(key=lambda p: _natural(p.name))
    stems = [p.stem for p in files]
    for p in files:
        if stems.count(p.stem) > 1:
            raise UserError(f"{home}: {' and '.join(f.name for f in files if f.stem == p.stem)} name the same client")
    return concatenate(home.resolve().name, (ClientData(p.stem, *_READERS[p.suffix.lower()](p)) for p in files))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A key by which client-2 comes before client-10."""
    return [(not w.isdecimal(), int(w) if w.isdecimal() else 0, w) for w in re.split(r"(\d+)", name) if w]


def _pt(path: Path) -> tuple[Array, Array]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged file may raise anything
        why = (str(e).splitlines() or ["it ends too early"])[0]
        raise UserError(f"{path}: not a readable file of tensors: {why}") from None
    return _tensors(path, held)


def _safetensors(path: Path) -> tuple[Array, Array]:
    try:
        return _tensors(path, load_file(path))
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path}: not a readable .safetensors file: {e}") from None


def _tensors(path: Path, held: object) -> tuple[Array, Array]:
    if not isinstance(held, Mapping) or not all(isinstance(held.get(n), Tensor) for n in "xy"):
        there = ", ".join(map(str, held)) if isinstance(held, Mapping) else type(held).__name__
        raise UserError(f"{path}: must hold tensors x and y; it has {there}")
    x, y = (held[n].detach() for n in "xy")
    x, y = (t.float() if t.is_floating_point() else t for t in (x, y))
    return x.numpy(), y.numpy()


def _csv(path: Path) -> tuple[Array, Array]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not a readable .csv file: {e}") from None
    if len(lines) < 2:
        raise UserError(f"{path}: a line of column names and then one per example are needed")
    names = [n.strip().lower() for n in next(csv.reader(lines[:1]))]
    if len(names) < 2 or any(re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", n) for n in names):
        raise UserError(f"{path}: the first line must name the columns, two or more; it is {lines[0][:60]!r}")
    try:
        table = np.loadtxt(lines[1:], delimiter=",", quotechar='"', comments=None, ndmin=2)
    except ValueError as e:
        raise UserError(f"{path}: below the column names: {e}") from None
    if table.shape[1] != len(names):
        raise UserError(f"{path}: {len(names)} column names but {table.shape[1]} columns")
    at = next((names.index(n) for n in ("label", "y", "target") if n in names), len(names) - 1)
    y = table[:, at]  # text has no types: whole numbers are classes
    return np.delete(table, at, axis=1), y.astype(np.int64) if (y == np.round(y)).all() else y


_READERS: dict[str, Callable[[Path], tuple[Array, Array]]] = {
    ".npz": read_client_npz,
    ".pt": _pt,
    ".safetensors": _safetensors,
    ".csv": _csv,
}
