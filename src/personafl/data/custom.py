"""One's own data as a `Source`: PyTorch data sets, Hugging Face partitions, a folder with each client's files.

Clients are numbered in the order they are given. Bytes are pixels and are scaled to [0, 1] for the model.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from personafl.core.errors import UserError
from personafl.core.types import TaskName
from personafl.data import tables
from personafl.data.client_data import ClientData, client_names, concatenate
from personafl.data.client_files import ClientFiles, client_folder, find_clients, listed
from personafl.data.columns import Column
from personafl.data.dataset import Array, Source, arrays
from personafl.data.image_folder import read_image_folders
from personafl.data.missing import Missing
from personafl.data.pfllib import is_pfllib, pfllib, read_client_npz, to_pfllib

__all__ = ["convert", "datasets", "folder", "hugging_face", "one_client", "open_folder", "pfllib", "to_pfllib"]

_LABELS = ("label", "labels", "fine_label", "y", "target")
_EXAMPLES = ("img", "image", "images", "pixels", "x", "features", "pixel_values")
_PLAIN = {"1": "L", "LA": "L", "P": "RGB", "RGBA": "RGB", "CMYK": "RGB"}  # modes of pictures, and what they become
_AT_ONCE = 1000  # rows of a table read together


def convert(made: Any, name: str, *, missing: Missing = "refuse", task: TaskName | Literal["auto"] = "auto") -> Source:
    """What a function of one's own gives: a `Source`, arrays (x, y[, clients]), or a list of clients' data sets."""
    if isinstance(made, Source):
        return made
    first = made[0] if isinstance(made, (list, tuple)) and made else None
    first = next(iter(first.values()), None) if isinstance(first, dict) else first
    first = first[0] if isinstance(first, tuple) and first else first
    if hasattr(made, "load_partition") or hasattr(first, "column_names"):
        return hugging_face(made, name=name, missing=missing, task=task)
    if isinstance(first, Dataset):
        return datasets(made, name=name, missing=missing, task=task)
    if isinstance(made, (list, tuple)) and len(made) in (2, 3):
        return arrays(*made, name=name, missing=missing, task=task)
    raise UserError(f"gave {type(made).__name__}; expected a Source, (x, y[, clients]) or a list of clients' data sets")


def datasets(
    parts: Sequence[Any],
    names: Sequence[str] | None = None,
    *,
    name: str = "datasets",
    missing: Missing = "refuse",
    task: TaskName | Literal["auto"] = "auto",
) -> Source:
    """A map-style data set per client, each item an example and its label, or a (training, test) pair of them.

    Every item is read once, so a random transform is drawn once. Pictures become bytes `[channels, height, width]`.
    """
    clients = (
        ClientData(client, *_items(f"{name}: client {client}{', test part' if test else ''}", data), test)
        for client, part in zip(client_names(names, len(parts)), parts, strict=True)
        for data, test in _halves(part)
    )
    return concatenate(name, clients, missing=missing, task=task)


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
        ys.append(_label(y, f"{where}, item {i}"))
        if xs[i].shape != xs[0].shape:
            raise UserError(f"{where}, item {i}: its shape is {xs[i].shape}, that of item 0 {xs[0].shape}")
        _check_label(ys, f"{where}, item {i}", "item 0")
    return _stacked(xs), _stacked(ys)


def _label(value: Any, where: str) -> Array:
    """A label: a number, text, or several numbers `[T]`."""
    found = np.asarray(value) if isinstance(value, str) else _array(value, where)
    return found.reshape(()) if found.size == 1 else found


def _check_label(labels: Sequence[Array], where: str, first: str) -> None:
    """The last label must be like the first."""
    if labels[-1].shape != labels[0].shape:
        raise UserError(f"{where}: its label has shape {labels[-1].shape}, that of {first} {labels[0].shape}")
    if (labels[-1].dtype.kind == "U") != (labels[0].dtype.kind == "U"):
        raise UserError(f"{where}: its label is {labels[-1].item()!r}, that of {first} {labels[0].item()!r}")


def _stacked(values: Sequence[Array]) -> Array:
    return np.stack(values) if values else np.zeros(0)


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
    parts: Any,
    image: str = "",
    label: str = "",
    *,
    names: Sequence[str] | None = None,
    name: str = "hugging-face",
    missing: Missing = "refuse",
    task: TaskName | Literal["auto"] = "auto",
) -> Source:
    """Partitions of a Hugging Face data set, or a Flower `FederatedDataset`, without either package being needed.

    A client is a `datasets.Dataset`, or {"train": ..., "test": ...}. `image` and `label` name its columns; otherwise
    they are found by their usual names. Of a `FederatedDataset` train and, where it is divided, test are taken.
    """
    clients = _loaded(parts) if hasattr(parts, "load_partition") else list(parts)
    sizes: set[int] = set()
    class_names: set[tuple[str, ...]] = set()

    def read() -> Iterator[ClientData]:
        for client, part in zip(client_names(names, len(clients)), clients, strict=True):
            for data, test in _halves(part):
                where = f"{name}: client {client}{', test part' if test else ''}"
                x, y = _column(where, data, image, _EXAMPLES, "image"), _column(where, data, label, _LABELS, "label")
                kinds = getattr(data, "features", None) or {}
                sizes.add(int(getattr(kinds.get(y), "num_classes", 0) or 0))
                class_names.add(tuple(getattr(kinds.get(y), "names", None) or ()))
                yield ClientData(client, *_columns(where, data, x, y, type(kinds.get(x)).__name__ == "Image"), test)

    held = list(read())
    known = class_names.pop() if len(class_names) == 1 else ()
    return concatenate(name, held, classes=max(sizes, default=0), missing=missing, task=task, class_names=known or None)


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
        for value in rows[y]:
            at = f"{where}, row {len(ys)}, column {y}"
            ys.append(_label(value, at))
            _check_label(ys, at, "row 0")
    return _stacked(xs), _stacked(ys)


# Folders


def open_folder(
    path: str | Path,
    *,
    label: Sequence[str] = (),
    missing: Missing = "refuse",
    image_size: int = 0,
    task: TaskName | Literal["auto"] = "auto",
) -> Source:
    """A folder of one's own: PFLlib's layout if it has train/ and test/, else a file or a folder per client."""
    home = Path(path)
    if is_pfllib(home):
        if label or image_size:
            raise UserError(
                f"{home}: data.{'label' if label else 'image_size'} does not go with PFLlib's train/ and test/"
            )
        return pfllib(home, missing=missing, task=task)
    return folder(home, label=label, missing=missing, image_size=image_size, task=task)


def folder(
    path: str | Path,
    *,
    label: Sequence[str] = (),
    missing: Missing = "refuse",
    image_size: int = 0,
    task: TaskName | Literal["auto"] = "auto",
) -> Source:
    """A file per client, named after it, or a folder per client with several, or with its pictures by class.

    Files are .npz, .pt or .safetensors with x and y, or .csv or .parquet with named columns, of which `label` names
    those of the labels (else label, y, target or the last). `missing` says what becomes of missing values. Pictures,
    `CLIENT/CLASS/PICTURE`, are of one size or resized to `image_size`. Nothing is unpickled.
    """
    home = Path(path)
    suffixes = (*_READERS, *tables.READERS)
    if home.suffix.lower() in suffixes and not home.is_dir():
        raise UserError(f"{home}: a {home.suffix} file is one client's and belongs in a folder; name that folder")
    if not home.is_dir():
        raise UserError(f"{home}: no such folder")
    clients = find_clients(home, suffixes)
    name = home.resolve().name
    if clients[0].classes:
        if label:
            raise UserError(f"{home}: data.label goes with .csv and .parquet files, and these are pictures")
        return concatenate(name, read_image_folders(clients, image_size))
    if image_size:
        raise UserError(f"{home}: data.image_size goes with folders of pictures, and these are none")
    parts, columns = _client_parts(clients, label, missing)
    return concatenate(name, parts, missing=missing, task=task, columns=columns)


@dataclasses.dataclass(frozen=True)
class ClientRows:
    """What the files of a single client hold, missing values not yet filled."""

    name: str
    parts: Sequence[ClientData]
    columns: tuple[Column, ...] | None  # where the files are tables

    def missing(self) -> NDArray[np.bool_] | None:
        """Which values are missing, by row of the data set `[N, ...]`; None where none is."""
        parts = [p.x for p in self.parts if len(p.x)]
        if any(x.dtype.kind != "f" for x in parts) or not any(np.isnan(x).any() for x in parts):
            return None
        return np.concatenate([np.isnan(x) for x in parts])

    def as_source(self, missing: Missing = "refuse", task: TaskName | Literal["auto"] = "auto") -> Source:
        """All rows as one data set; `missing` says what becomes of missing values."""
        return concatenate(self.name, self.parts, missing=missing, task=task, columns=self.columns)


def one_client(
    path: str | Path,
    *,
    label: Sequence[str] = (),
    missing: Missing = "refuse",
    image_size: int = 0,
    task: TaskName | Literal["auto"] = "auto",
) -> Source:
    """What a single client holds: files as `folder` reads them, or a folder of pictures for each class.

    Where it has `train` and `test`, files or folders of such, those are its two parts.
    """
    return read_client(path, label=label, missing=missing, image_size=image_size).as_source(missing, task)


def read_client(
    path: str | Path, *, label: Sequence[str] = (), missing: Missing = "refuse", image_size: int = 0
) -> ClientRows:
    """Read the files of a single client, as `one_client` has them; a missing value is NaN or refused."""
    home = Path(path)
    if not home.is_dir():
        raise UserError(f"{home}: no such folder")
    suffixes, name = (*_READERS, *tables.READERS), home.resolve().name
    there = {p.name if p.is_dir() else p.stem: p for p in listed(home, suffixes)}
    halves = {half: there[half] for half in ("train", "test") if half in there}
    if len(halves) == 1:
        raise UserError(f"{home}: has {next(iter(halves))} alone; give train and test, or neither")
    if halves and (other := next((p for n, p in there.items() if n not in halves), None)):
        raise UserError(f"{other}: beside train and test; put it into one of them")
    held = [
        dataclasses.replace(client_folder(p, suffixes), name=half) if p.is_dir() else ClientFiles(half, p, (p,))
        for half, p in halves.items()
    ] or [client_folder(home, suffixes)]
    columns: tuple[Column, ...] | None = None
    if held[0].classes:
        parts = read_image_folders(held, image_size)
    else:
        parts, columns = _client_parts(held, label, missing)
    mine = [dataclasses.replace(p, name=name, test=p.name == "test" if halves else None) for p in parts]
    return ClientRows(name, mine, columns)


def _client_parts(
    clients: Sequence[ClientFiles], label: Sequence[str], missing: Missing
) -> tuple[list[ClientData], tuple[Column, ...] | None]:
    """What every file holds, in order, and the columns of the features where all are tables."""
    files = [(c.name, p) for c in clients for p in c.files]
    held = [(c, tables.READERS[p.suffix.lower()](p)) for c, p in files if p.suffix.lower() in tables.READERS]
    if label and not held:
        raise UserError(f"{clients[0].path}: data.label goes with .csv and .parquet files, and there are none")
    encoded, columns = tables.encode(held, label, missing) if held else ([], ())
    of_table = iter(encoded)
    parts = [
        next(of_table) if p.suffix.lower() in tables.READERS else ClientData(c, *_READERS[p.suffix.lower()](p))
        for c, p in files
    ]
    return parts, columns if len(held) == len(files) else None


def _pt(path: Path) -> tuple[Array, Array]:
    try:
        with path.open("rb") as file:
            archive = file.read(4) == b"PK\x03\x04"
        # In the older form lengths are read from the file itself, which would make room for whatever they say.
        found = path if archive else io.BytesIO(path.read_bytes())
        held = torch.load(found, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged file may raise anything
        why = (str(e).splitlines() or ["it ends too early"])[0]
        raise UserError(f"{path}: not a readable file of tensors: {why[:300]}") from None
    return _tensors(path, held)


def _safetensors(path: Path) -> tuple[Array, Array]:
    try:
        return _tensors(path, load_file(path))
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path}: not a readable .safetensors file: {e}") from None


def _tensors(path: Path, held: object) -> tuple[Array, Array]:
    if not isinstance(held, Mapping) or not all(isinstance(held.get(n), Tensor) for n in "xy"):
        names = [k[:40] if isinstance(k, str) else type(k).__name__ for k in held] if isinstance(held, Mapping) else []
        there = ", ".join(names[:20]) if isinstance(held, Mapping) else type(held).__name__
        raise UserError(f"{path}: must hold tensors x and y; it has {there}")
    x, y = (_plain(path, n, held[n]) for n in "xy")
    return x, y


def _plain(path: Path, name: str, t: Tensor) -> Array:
    """A tensor as an array: floats in single precision; one that is no row of numbers in memory is refused."""
    kind = str(t.dtype).removeprefix("torch.")
    why = ""
    if t.layout != torch.strided or t.is_quantized or t.is_complex() or t.device.type != "cpu":
        device = "" if t.device.type == "cpu" else f", {t.device.type}"
        why = f"it is {'sparse' if t.layout != torch.strided else kind}{device}, not an ordinary tensor of numbers"
    elif t.numel() * t.element_size() > t.untyped_storage().nbytes():
        why = f"its shape {tuple(t.shape)} repeats the few numbers that are in the file; save {name}.contiguous()"
    if why:
        raise UserError(f"{path}: {name}: {why}")
    try:
        return (t.detach().float() if t.is_floating_point() else t.detach()).numpy()
    except (TypeError, RuntimeError):  # a type that NumPy has not
        raise UserError(f"{path}: {name}: numbers of type {kind} cannot be read") from None


_READERS: dict[str, Callable[[Path], tuple[Array, Array]]] = {
    ".npz": read_client_npz,
    ".pt": _pt,
    ".safetensors": _safetensors,
}
