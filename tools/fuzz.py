"""Fuzzing: whatever bytes a reader is given, it gives a value or raises an error of ours, in bounded time and memory.

    python tools/fuzz.py --target codec --count 1000000 --seed 0
    python tools/fuzz.py --count 2000                             every target, so many inputs each
    python tools/fuzz.py --target codec --input 123 --seed 0      one of them again, with its traceback
    python tools/fuzz.py --target codec --atheris 1000000         guided by coverage (pip install atheris)

Input number i of a target is a function of the seed, of i and of the corpus: a valid file, or one of
tests/fuzz_corpus/TARGET, with a few things changed (bits, bytes, numbers of note, pieces cut out, doubled or taken
from another file). What would be refused for its checksum alone is sealed again: bodies of messages, and files within
archives.

A finding is any exception but `UserError` and `WireError`, also where one of these was raised in place of a
`MemoryError`; an input that takes longer than --seconds; and the end of the process. Inputs are read in a process of
their own with --memory-mib more memory than it begins with. Findings are printed, and written to --out.

A reader is a line of `TARGETS`: a function of bytes and of an empty folder, and valid files to begin with.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import json
import logging
import multiprocessing
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save as save_safetensors

from personafl import Result, config, resume, run
from personafl.core import wire
from personafl.core.errors import UserError
from personafl.core.types import Masked
from personafl.core.wire import WireError
from personafl.data import Federation, Source, custom, formats, partition_file
from personafl.deployment.client_reports import categories_beyond, find_excess, labels_beyond
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.messages import Failure, Reply, Request
from personafl.deployment.node import Node
from personafl.deployment.remote_pool import RemotePool
from personafl.deployment.settings import ClientSettings, Deployment
from personafl.deployment.stage_progress import StageProgress
from personafl.experiment import checkpoint_files
from personafl.storage import files
from personafl.storage.npz import read_npy
from personafl.storage.store import FEWEST, Store

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "fuzz_corpus"
BODIES = CORPUS / "codec-bodies"  # what atheris kept: messages without their headers
OURS = (UserError, WireError)
BATCH = 20_000  # inputs a process reads before the next takes over

Parts = dict[str, bytes]
Read = Callable[[bytes, Path], object]


# What is within what


def sealed(body: bytes) -> bytes:
    """A message with this body."""
    return b"PFL3" + struct.pack("<QI", 16 + len(body), zlib.crc32(body)) + body


def opened_message(raw: bytes) -> Parts:
    return {"body": raw[16:]}


def opened_archive(raw: bytes) -> Parts:
    """The files of an archive; none where it is damaged."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            return {n: archive.read(n) for n in archive.namelist()}
    except Exception:  # a damaged one may raise anything
        return {}


def archive_of(parts: Parts) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, raw in parts.items():
            archive.writestr(zipfile.ZipInfo(name), raw)
    return out.getvalue()


@dataclass(frozen=True)
class Form:
    """What a file is made of, so that a part can be changed and the whole put together again."""

    opened: Callable[[bytes], Parts]
    closed: Callable[[Parts], bytes]


MESSAGE = Form(opened_message, lambda parts: sealed(parts["body"]))
ARCHIVE = Form(opened_archive, archive_of)


# Changes

NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    16,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
    2**64 - 1,
)
WORDS = (
    *(b"-1", b"0", b"1e999", b"nan", b"1e9", b"99999999999999999999", b"true", b"null", b'""', b"[]", b"{}", b"'"),
    *(b'"', b"[", b"]", b"{", b"}", b",", b":", b"\n", b"\x00", b"\xff", b"=", b"../x", b"1_0", b"\xe2\x80\xa8"),
)


def changed(raw: bytes, other: bytes, draw: random.Random) -> bytes:
    """The bytes with one thing changed; `other` is a file of the same kind."""
    out, size = bytearray(raw), len(raw)
    at, end = sorted((draw.randint(0, size), draw.randint(0, size)))
    end = min(end, at + 64) if draw.random() < 0.8 else end
    kind = draw.randrange(10)
    if kind <= 2 and size:
        place = draw.randrange(size)
        out[place] = out[place] ^ 1 << draw.randrange(8) if kind else draw.randrange(256)
    elif kind <= 4:
        form = draw.choice(["<B", "<H", "<I", "<Q", ">H", ">I", ">Q"])
        number = struct.pack(form, draw.choice(NUMBERS) & (1 << 8 * struct.calcsize(form)) - 1)
        out[at : at + len(number)] = number
    elif kind == 5:
        out[at : draw.choice((at, end))] = draw.choice(WORDS)
    elif kind == 6:
        del out[at : draw.choice((end, end, size))]
    elif kind == 7:
        out[end:end] = out[at:end] * draw.choice((1, 1, 2, 50))
    elif kind == 8:
        begin = draw.randint(0, len(other))
        out[at:end] = other[begin : begin + draw.randint(0, 64)]
    else:
        out[at:at] = draw.randbytes(draw.randint(1, 8))
    return bytes(out)


@dataclass(frozen=True)
class Target:
    """A reader, valid files for it, and what these are made of."""

    read: Read
    seeds: Callable[[], list[bytes]]
    form: Form | None = None

    def input(self, number: int, seed: int, files: Sequence[bytes]) -> bytes:
        """Input `number`: some file with one to six things changed."""
        draw = random.Random(f"{seed} {number}")
        raw, other = draw.choice(files), draw.choice(files)
        times = draw.choice((1, 1, 1, 2, 3, 6))
        if self.form is not None and draw.random() < 0.85 and (parts := self.form.opened(raw)):
            name = draw.choice(sorted(parts))
            others = self.form.opened(other)
            beside = others.get(name, other)
            for _ in range(times):
                parts[name] = changed(parts[name], beside, draw)
            return self.form.closed(parts)
        for _ in range(times):
            raw = changed(raw, other, draw)
        return raw

    def files(self, name: str) -> list[bytes]:
        """What inputs are made of."""
        return self.seeds() + [p.read_bytes() for p in sorted((CORPUS / name).glob("*"))]


# Readers


def read_message(raw: bytes, _: Path) -> object:
    return wire.unpack(raw, {"known": torch.tensor([False, True, True, False])}, limit=2**20)


def messages() -> list[bytes]:
    places = torch.zeros(100, dtype=torch.bool)
    places[[7, 90]] = True
    units = torch.zeros(9, 17, 2, dtype=torch.bool)
    units[2:7, ::2] = True
    known = torch.tensor([False, True, True, False])
    payloads: list[dict[str, Any]] = [
        {},
        {"dense": torch.tensor([[1.0, 2.0]]), "number": torch.tensor(3), "none": torch.zeros(0, 3)},
        {"bits": Masked(torch.ones(9), torch.arange(9) % 2 == 0), "places": Masked(torch.ones(100).half(), places)},
        {"units": Masked(torch.ones(9, 17, 2), units), "truth": torch.tensor([True, False, True])},
        {"known": Masked(torch.ones(4, dtype=torch.float64), known, known=True), "b": torch.zeros(2).bfloat16()},
        {f"layer.{i}": torch.full((2, 2), i, dtype=torch.uint8) for i in range(4)},
    ]
    return [wire.pack(p) for p in payloads] + [sealed(p.read_bytes()) for p in sorted(BODIES.glob("*"))]


def in_file(name: str, read: Callable[[Path], object]) -> Read:
    """A reader of a file of this name."""

    def read_file(raw: bytes, folder: Path) -> object:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        return read(path)

    return read_file


def folder_of(path: Path) -> Source:
    return custom.folder(path.parent)


X, Y = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])
PIXELS = (np.arange(2 * 3072) % 251).astype(np.uint8).reshape(2, 3072)


def pickles() -> list[bytes]:
    held = {"data": PIXELS[:, :24].repeat(128, axis=1), "labels": [1, 2], b"name": b"raw", "more": np.float64(1.5)}
    made = [pickle.dumps(held, protocol) for protocol in range(2, 6)]
    made.append(made[0].replace(b"numpy._core", b"numpy.core"))
    made.append(pickle.dumps({"data": np.asfortranarray(PIXELS), "labels": np.array([0, 9], ">i2")}, 4))
    return [*made, pickle.dumps([held, (1, 2.5, None, True), {"a": [X, Y]}], 2)]


def read_pickle(raw: bytes, folder: Path) -> object:
    return in_file("batch", lambda p: formats.read_cifar_python(p, "labels", 10))(raw, folder)


def archives() -> list[bytes]:
    out = []
    for held in (
        {"x": X, "y": Y},
        {"x": (X > 3), "y": Y.astype(np.uint8)},
        {"x": X.astype(">f8"), "y": np.array(list("abcabc")), "clients": Y},
        {"x": np.asfortranarray(X.reshape(6, 1, 2)), "y": (Y[:, None] == np.arange(3))},
        {"x": np.arange(24).reshape(6, 4), "y": np.arange(24).reshape(6, 4) % 5},
    ):
        file = io.BytesIO()
        np.savez(file, **held)
        out.append(file.getvalue())
    return out


def read_archive(raw: bytes, folder: Path) -> object:
    """As the file of a client, and as that of a data set."""
    path = folder / "a.npz"
    path.write_bytes(raw)
    from personafl.config.components import source

    with contextlib.suppress(UserError):
        source(config.load({"data": {"dataset": str(path)}, "algorithms": [{"name": "local"}]}))
    return custom.folder(folder)


def arrays_alone() -> list[bytes]:
    out = []
    for held in (X, Y, np.array(["a", "bc"]), np.array(3.0), np.zeros((0, 4))):
        file = io.BytesIO()
        np.save(file, held)
        out.append(file.getvalue())
    return out


def pfllib_archives() -> list[bytes]:
    out = []
    for held in ({"x": X, "y": Y}, {"x": list(X), "y": Y.tolist()}, {"x": X.astype(">f4"), "y": list(Y)}):
        file = io.BytesIO()
        np.savez_compressed(file, data=np.array(held, np.object_))
        out.append(file.getvalue())
    return out


def read_pfllib(raw: bytes, folder: Path) -> object:
    for part in ("train", "test"):
        in_file(f"{part}/0.npz", lambda p: p)(raw, folder)
    return custom.open_folder(folder)


def tensors() -> list[bytes]:
    out = []
    for held, new in (
        ({"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}, True),
        ({"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}, False),
        ({"x": torch.from_numpy(X).to_sparse(), "y": torch.from_numpy(Y)}, True),
        ({"x": torch.zeros(6, 2, device="meta"), "y": torch.from_numpy(Y).to(torch.uint16)}, True),
    ):
        file = io.BytesIO()
        torch.save(held, file, _use_new_zipfile_serialization=new)
        out.append(file.getvalue())
    return out


def safetensors_files() -> list[bytes]:
    x = torch.from_numpy(X)
    return [
        save_safetensors({"x": x, "y": torch.from_numpy(Y)}),
        save_safetensors({"x": x.to(torch.float8_e4m3fn), "y": torch.from_numpy(Y)}),
    ]


CSV = (
    b"a,b,label\n1,2.5,0\n2,3.5,1\n3,-4e1,2\n",
    b'\xef\xbb\xbfcolour,"si ze",y\nred,1,cat\n"bl""ue",2,dog\n,3,cat\n',
    b"a,b,y\n1,nan,0.5\n2,,1.5\n\n3,4,2.5\n",
)


def read_csv(raw: bytes, folder: Path) -> object:
    """Alone, and beside a client whose columns are known."""
    (folder / "b.csv").write_bytes(CSV[0])
    (folder / "a.csv").write_bytes(raw)
    with contextlib.suppress(UserError):
        custom.folder(folder, missing="mean")
    (folder / "b.csv").unlink()
    return custom.folder(folder, missing="zero")


def pictures() -> list[bytes]:
    out = []
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for picture, kind in (
        (Image.fromarray(grey), "PNG"),
        (Image.fromarray(np.stack([grey] * 3, axis=2)), "PNG"),
        (Image.fromarray(grey).convert("P"), "PNG"),
        (Image.fromarray(grey), "JPEG"),
        (Image.fromarray(grey), "BMP"),
        (Image.fromarray(np.stack([grey] * 3, axis=2)), "WEBP"),
    ):
        file = io.BytesIO()
        picture.save(file, kind)
        out.append(file.getvalue())
    return out


def read_picture(raw: bytes, folder: Path) -> object:
    home = folder / "client" / "class"
    home.mkdir(parents=True)
    for suffix in ("png", "jpg", "webp"):  # Pillow goes by what is in a file
        (home / f"a.{suffix}").write_bytes(raw)
    return custom.folder(folder, image_size=4)


@functools.cache
def divided() -> Federation:
    y = torch.arange(24) % 3
    return Federation.build(Source("toy", torch.zeros(24, 2), y, 3), np.split(np.arange(24), 3), seed=0)


def partitions() -> list[bytes]:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "split.json"
        partition_file.save(divided(), path, {"partition": "iid"})
        return [path.read_bytes()]


def recipes() -> list[bytes]:
    own = b"""[data]
dataset = "digits"
partition = "dirichlet"
alpha = 0.1
[training]
lr_decay = 0.99
[[algorithms]]
name = "fedpews"
base = { name = "dm-pfl", sparsity = 0.5 }
inherit = { transfer = "mmd" }
[[algorithms]]
name = "fedavg"
label = "other"
"""
    return [own, *(text.encode() for text in config.recipes().values())]


def fresh(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(len(ids), 3), "mask": torch.zeros(len(ids), 2, 5, dtype=torch.bool)}


def stores() -> list[bytes]:
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "store"
        store = Store(fresh, folder, expected=4)
        store.scatter(torch.tensor([3, 1]), {"w": torch.ones(2, 3), "mask": torch.ones(2, 2, 5, dtype=torch.bool)})
        store.commit(0)
        parts = {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
        long = [n for n in parts if n in ("ids.bin", "sums.bin") or n.endswith(".rows")]
        rows = {n: parts[n][: len(parts[n]) // FEWEST * 4] for n in long}
        return [archive_of(parts | rows)]


def unpacked(raw: bytes, folder: Path, names: Sequence[str] = ()) -> bool:
    """The files of an archive in a folder, those of these names if any are given; whether there were some."""
    parts = {n: part for n, part in opened_archive(raw).items() if Path(n).name == n and (not names or n in names)}
    for name, part in parts.items():
        with contextlib.suppress(OSError, ValueError):
            (folder / name).write_bytes(part)
    return bool(parts)


def read_store(raw: bytes, folder: Path) -> object:
    if not unpacked(raw, folder):
        return None
    store = Store.opened(fresh, folder)
    store.gather(torch.tensor([1, 2, 3]))
    return list(store.parts(64))


RUN_FILES = ("summary.json", "metrics.jsonl", "clients.csv", "evaluations.npz")


@functools.cache
def finished() -> Path:
    """A run folder, gone when the program ends."""
    home = Path(tempfile.mkdtemp(prefix="fuzz-run-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    np.savez(home / "data.npz", x=np.tile(X, (4, 1)), y=np.tile(Y, 4), clients=np.arange(24) // 8)
    recipe = {
        "data": {"dataset": str(home / "data.npz"), "partition": "natural"},
        "training": {"num_rounds": 1, "batch_size": 4, "local_epochs": 1},
        "faults": {"faulty_ratio": 0.4},  # so that a summary has `faults`
        "algorithms": [{"name": "fedper"}],
    }
    run(recipe, out=home / "run", quiet=True, device="cpu")
    return home / "run"


def runs() -> list[bytes]:
    home = finished() / "fedper" / "seed-0"
    return [archive_of({n: (home / n).read_bytes() for n in RUN_FILES})]


def read_run(raw: bytes, folder: Path) -> object:
    shutil.copytree(finished(), folder / "run")
    home = folder / "run" / "fedper" / "seed-0"
    if not unpacked(raw, home, RUN_FILES):
        return None
    stamp_again(home, home / "checkpoint")
    return Result.load(folder / "run", device="cpu").table()


def stamp_again(home: Path, folder: Path) -> None:
    """Make a manifest say what files are, so that changed ones get past it; as far as it can still be read."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        told = json.loads((folder / checkpoint_files.MANIFEST).read_text())
        del told["sha256"]
        for name in told["files"]:
            told["files"][name] = files.stamp(home / name)
        told["rows"] = files.stamp(home / checkpoint_files.ROWS)
        (folder / checkpoint_files.MANIFEST).write_text(json.dumps(told | {"sha256": checkpoint_files.digest(told)}))


CHECKPOINT_FILES = ("manifest.json", "state.safetensors", "clients.safetensors")


@functools.cache
def interrupted() -> Path:
    """A run folder with one checkpoint, behind the first of two rounds."""
    whole = finished()
    home = whole.with_name("cut")

    def cut(*_: object) -> None:
        raise InterruptedError

    with contextlib.suppress(InterruptedError):
        words: dict[str, Any] = {"out": home, "quiet": True, "device": "cpu", "checkpoint_every": 1, "watch": cut}
        run(whole / "recipe.toml", "training.num_rounds=2", "faults.faulty_ratio=0", **words)
    shutil.rmtree(home / "fedper" / "seed-0" / "progress" / "00000000")
    return home


def checkpoints() -> list[bytes]:
    home = interrupted() / "fedper" / "seed-0"
    held = {n: (home / "progress" / "00000001" / n).read_bytes() for n in CHECKPOINT_FILES}
    return [archive_of(held | {checkpoint_files.ROWS: (home / checkpoint_files.ROWS).read_bytes()})]


def read_checkpoint(raw: bytes, folder: Path) -> object:
    shutil.copytree(interrupted(), folder / "run")
    home = folder / "run" / "fedper" / "seed-0"
    at = home / "progress" / "00000001"
    if not unpacked(raw, at, CHECKPOINT_FILES) or not unpacked(raw, home, (checkpoint_files.ROWS,)):
        return None
    stamp_again(home, at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resume(folder / "run", quiet=True).table()


# Messages of a deployment


def leaves(told: Any, path: str = "told") -> Parts:
    """What JSON holds, piece by piece: each can be changed by itself, and what it becomes is still JSON or text."""
    if isinstance(told, list) and told and all(isinstance(v, dict) for v in told):
        told = {str(i): v for i, v in enumerate(told)}
    if not isinstance(told, dict):
        return {path: json.dumps(told).encode()}
    return {k: v for name, value in told.items() for k, v in leaves(value, f"{path}/{name}").items()}


def grown(parts: Parts) -> Any:
    """The inverse; where all names of a table are numbers it is a list."""
    told: dict[str, Any] = {}
    for path, raw in parts.items():
        *outer, last = path.split("/")
        at = told
        for name in outer:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise UserError(f"{path}: within what is no table")
        at[last] = _value(raw)
    return _lists(told).get("told", {})


def _value(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.decode(errors="replace")


def _lists(told: Any) -> Any:
    if not isinstance(told, dict):
        return told
    inner = {k: _lists(v) for k, v in told.items()}
    return list(inner.values()) if inner and all(k.isdecimal() for k in inner) else inner


def message_of(kind: str, told: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    bodies = {f"blob{i}": opened_message(blob)["body"] for i, blob in enumerate(blobs)}
    return archive_of({"kind": kind.encode(), **leaves(told), **bodies})


def read_parts(raw: bytes) -> tuple[str, dict[str, Any], tuple[bytes, ...]]:
    """Kind, table and blobs of a message; a transport refuses what has no table."""
    parts = opened_archive(raw)
    told = grown({n: v for n, v in parts.items() if n.startswith("told")})
    if not isinstance(told, dict):
        raise UserError("not a table")
    blobs = tuple(sealed(v) for n, v in sorted(parts.items()) if n.startswith("blob"))
    return parts.get("kind", b"").decode(errors="replace"), told, blobs


class Recorded:
    """Nodes within the process, all that was said, and for one of them another reply in its place."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.held, self.said = nodes, list[tuple[Request, Reply]]()
        self.more, self.spoilt = list[int](), Reply()

    def nodes(self) -> list[int]:
        return [*self.held, *self.more]

    def key(self, node: int) -> str:
        return str(node)

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> dict[int, Reply | Failure]:
        return {n: self.spoilt if self.more else self._answer(n, r) for n, r in requests.items()}

    def _answer(self, node: int, request: Request) -> Reply:
        reply = self.held[node].answer(request)
        self.said.append((request, reply))
        return reply


@functools.cache
def deployed() -> tuple[Coordinator, Recorded]:
    """A deployment of two clients that is over: DM-PFL with all that it may be asked to score."""
    home = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    draw = np.random.default_rng(0)
    for i in range(2):
        (home / f"data{i}").mkdir()
        rows = [f"{draw.random()},{draw.random()},{'east' if j % 2 else f'ward {i}'},{j % 3}" for j in range(20)]
        (home / f"data{i}" / "a.csv").write_text("\n".join(["age,dose,ward,label", *rows]))
    recipe = {
        "data": {"validation_share": 0.2},
        "training": {"num_rounds": 2, "join_ratio": 1.0, "local_epochs": 1, "batch_size": 8, "lr": 0.1},
        "evaluation": {"shift": "none", "when": "after_local", "train_loss": True},
        "algorithms": [{"name": "dm-pfl", "iterations": 1, "allocation": "erk"}],
    }
    nodes = {
        i: Node(ClientSettings(id=f"c{i}", data=str(home / f"data{i}"), state=str(home / f"state{i}"), threads=1))
        for i in range(2)
    }
    transport = Recorded(nodes)
    server = Coordinator(home / "server", Deployment(clients=2), config.dump(config.load(recipe)), transport)
    logging.getLogger("personafl").setLevel(logging.CRITICAL)
    server.run()
    return server, transport


def replies() -> list[bytes]:
    return [message_of(q.kind, r.told, (r.blob,) if r.blob else ()) for q, r in deployed()[1].said]


def read_reply(raw: bytes, _: Path) -> object:
    """All that a server makes of a reply: who it is, what its data are, what it trained, how it scores."""
    kind, told, blobs = read_parts(raw)
    server, transport = deployed()
    reply = Reply(told, blobs[0] if blobs else b"")
    transport.more, transport.spoilt = [7], reply
    members = server.members
    before = copy.copy(server.__dict__), copy.deepcopy(server.state), copy.copy(members.__dict__)
    roster, members.met = copy.deepcopy(members.roster), dict(members.met)
    try:
        if kind == "hello":
            return members.hello()
        if kind == "describe":
            clients = server.roster.members
            found = members._described({0: (7, clients[0])})
            assert server.world is not None
            for d in found.values():
                d.unlike(d), d.kind, labels_beyond(d.form, server.world.form)
                if not d.form.unlike(server.world.form):
                    categories_beyond(d.form, server.world.form)
                find_excess({0: d}, members._common_form([d.form]))
                members._normalization(server.world.form, {0: d}, clients, {m.name: m.node for m in clients})
            return found
        return _heard(server, reply)
    finally:
        server.__dict__.update(before[0])
        members.__dict__.update(before[2])
        server.state, members.roster = before[1], roster


def _heard(server: Coordinator, reply: Reply) -> object:
    """What comes of a reply to the first stage."""
    server.state.played = 0
    stage, pool = server.begin(0), RemotePool(server, set(), 1)
    talk = server.talk(server.roster.members[0], 0)
    talk.hear(reply, server._bounds(talk.member))
    update, why = pool._update(stage, talk)
    progress = pool.progress = StageProgress([0], 1)
    if update is None:
        progress.record_failure(0, why, talk, now=0.0)
    else:
        progress.record_update(0, update, talk)
        for result in pool.results(stage):
            stage.take(result)
        stage.aggregate()
    scores = [s for s in (talk.scores, talk.judged) if s is not None]
    return json.dumps([progress.failure_columns(), progress.losses(), [server._stats({0: s}) for s in scores]])


def requests() -> list[bytes]:
    return [message_of(q.kind, q.told, q.blobs) for q, _ in deployed()[1].said]


@functools.cache
def sent() -> frozenset[bytes]:
    """Blobs that a server has sent."""
    return frozenset(blob for q, _ in deployed()[1].said for blob in q.blobs)


class Unforeseen(logging.Handler):
    """Raises again what a node did not foresee, and only told its log of."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found = record.exc_info[1]


def read_request(raw: bytes, folder: Path) -> object:
    """What a node answers; tensors that are not those of its method may end its work in any way."""
    kind, told, blobs = read_parts(raw)
    if kind not in ("hello", "describe", "work"):
        raise UserError("no kind of message")
    _, transport = deployed()
    node = Node(dataclasses.replace(transport.held[0].settings, state=str(folder / "state")))
    log, heard = logging.getLogger("personafl"), Unforeseen()
    log.setLevel(logging.ERROR)
    log.addHandler(heard)
    log.propagate = False
    try:
        reply = node.answer(Request(kind, told, blobs))  # type: ignore[arg-type]
    finally:
        log.removeHandler(heard)
        log.setLevel(logging.CRITICAL)
    if (found := getattr(heard, "found", None)) is not None and (out_of_memory(found) or set(blobs) <= sent()):
        raise found
    json.dumps(reply.told, allow_nan=False)
    outside = [p for p in folder.rglob("*") if p.is_file() and folder / "state" not in p.parents]
    assert not outside, outside
    return reply


TARGETS: dict[str, Target] = {
    "codec": Target(read_message, messages, MESSAGE),
    "pickle": Target(read_pickle, pickles),
    "npz": Target(read_archive, archives, ARCHIVE),
    "npy": Target(in_file("a.npy", read_npy), arrays_alone),
    "pfllib": Target(read_pfllib, pfllib_archives, ARCHIVE),
    "pt": Target(in_file("a.pt", folder_of), tensors, ARCHIVE),
    "safetensors": Target(in_file("a.safetensors", folder_of), safetensors_files),
    "csv": Target(read_csv, lambda: list(CSV)),
    "picture": Target(read_picture, pictures),
    "split": Target(in_file("split.json", lambda p: partition_file.load(p, divided().source)), partitions),
    "recipe": Target(in_file("recipe.toml", config.load), recipes),
    "store": Target(read_store, stores, ARCHIVE),
    "run": Target(read_run, runs, ARCHIVE),
    "checkpoint": Target(read_checkpoint, checkpoints, ARCHIVE),
    "reply": Target(read_reply, replies, ARCHIVE),
    "request": Target(read_request, requests, ARCHIVE),
}


# Running


class TooLong(Exception):  # noqa: N818
    """An input took longer than it may."""


def _alarm(*_: object) -> None:
    raise TooLong("it took too long")


def out_of_memory(e: BaseException | None) -> bool:
    """Whether it, or what it stands for, is a lack of memory."""
    while e is not None:
        if isinstance(e, MemoryError) or "can't allocate memory" in str(e) or "Cannot allocate memory" in str(e):
            return True
        e = e.__context__
    return False


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def tried(target: Target, raw: bytes, folder: Path, seconds: int = 0) -> str:
    """What is wrong with how a reader takes these bytes, `kind at place`; nothing if all is well."""
    emptied(folder)
    signal.alarm(seconds)
    try:
        target.read(raw, folder)
    except Exception as e:
        if isinstance(e, OURS) and not out_of_memory(e):
            return "" if len(str(e).splitlines()) == 1 else f"not one line: {str(e)!r:.200}"
        places = [f for f in traceback.extract_tb(e.__traceback__) if "personafl" in f.filename]
        place = f"{Path(places[-1].filename).name}:{places[-1].lineno}" if places else "?"
        kind = "MemoryError" if out_of_memory(e) else type(e).__name__
        return f"{kind} at {place}: {' '.join(str(e).split())[:150]}"
    finally:
        signal.alarm(0)
    return ""


def limited(mib: int) -> None:
    """Let this process have so much more memory than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def prepare() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Work:
    """Inputs of a target, from one number up to another."""

    name: str
    seed: int
    begin: int
    end: int
    seconds: int
    memory_mib: int


def _work(work: Work, at: Any, findings: Any) -> None:
    prepare()
    signal.signal(signal.SIGALRM, _alarm)
    target = TARGETS[work.name]
    files = target.files(work.name)
    with tempfile.TemporaryDirectory() as home:
        for raw in target.seeds():  # what is imported or made once is not the first input's to pay
            tried(target, raw, Path(home))
        limited(work.memory_mib)
        for number in range(work.begin, work.end):
            at.value = number
            found = tried(target, target.input(number, work.seed, files), Path(home), work.seconds)
            if found:
                findings.put((number, found))
        at.value = work.end


def fuzzed(name: str, count: int, seed: int, seconds: int, memory_mib: int) -> Iterator[tuple[int, str]]:
    """All findings among so many inputs, each with its number."""
    context = multiprocessing.get_context("fork")
    if name == "run":
        finished()
    begin = 0
    while begin < count:
        work = Work(name, seed, begin, min(count, begin + BATCH), seconds, memory_mib)
        at, findings = context.Value("q", -1), context.SimpleQueue()
        process = context.Process(target=_work, args=(work, at, findings))
        process.start()
        while process.is_alive() or not findings.empty():
            if findings.empty():
                process.join(0.05)
            else:
                yield findings.get()
        begin = at.value
        if begin < work.end:
            yield begin, f"the process ended with {process.exitcode}"
            begin += 1


def guided(runs: int) -> None:
    """Bodies of messages by atheris, which keeps those that reach new lines, in the corpus."""
    atheris = importlib.import_module("atheris")
    prepare()
    for home in (wire, wire._Reader):
        for name, f in list(vars(home).items()):
            if getattr(f, "__module__", "") == wire.__name__ and hasattr(f, "__code__"):
                setattr(home, name, atheris.instrument_func(f))

    def one(body: bytes) -> None:
        with contextlib.suppress(*OURS):
            read_message(sealed(body), Path())

    BODIES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as seeds:
        for i, raw in enumerate(messages()):
            (Path(seeds) / str(i)).write_bytes(raw[16:])
        flags = [f"-runs={runs}", "-max_len=512", "-print_final_stats=1", "-rss_limit_mb=1024", "-timeout=10"]
        atheris.Setup([sys.argv[0], *flags, str(BODIES), seeds], one)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description="Feed wrong bytes to every reader.")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all of them")
    parser.add_argument("--count", type=int, default=1000, help="inputs for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=10, help="the most an input may take")
    parser.add_argument("--memory-mib", type=int, default=1024, help="the most the inputs may take")
    parser.add_argument("--input", type=int, help="read one input only, and show its traceback")
    parser.add_argument("--out", type=Path, help="a folder for the inputs of findings")
    parser.add_argument("--atheris", type=int, metavar="RUNS", help="guided by coverage, codec only")
    asked = parser.parse_args()
    names = asked.target or list(TARGETS)
    if asked.atheris is not None:
        guided(asked.atheris)
        return 0
    if asked.input is not None:
        return _shown(names[0], asked.input, asked.seed)
    total = Counter[str]()
    for name in names:
        begun, kinds = time.perf_counter(), Counter[str]()
        for number, told in fuzzed(name, asked.count, asked.seed, asked.seconds, asked.memory_mib):
            if not kinds[told.split(": ")[0]]:
                print(f"{name} input {number}: {told}", flush=True)
                if asked.out is not None:
                    target = TARGETS[name]
                    asked.out.mkdir(parents=True, exist_ok=True)
                    raw = target.input(number, asked.seed, target.files(name))
                    (asked.out / f"{name}-{asked.seed}-{number}").write_bytes(raw)
            kinds[told.split(": ")[0]] += 1
        total[name] = sum(kinds.values())
        seconds = time.perf_counter() - begun
        line = {"target": name, "inputs": asked.count, "seed": asked.seed, "findings": total[name], "kinds": len(kinds)}
        print(json.dumps(line | {"seconds": round(seconds, 1)}), flush=True)
    return 1 if sum(total.values()) else 0


def _shown(name: str, number: int, seed: int) -> int:
    prepare()
    target = TARGETS[name]
    raw = target.input(number, seed, target.files(name))
    print(f"{len(raw)} bytes: {raw[:300]!r}")
    with tempfile.TemporaryDirectory() as home:
        try:
            target.read(raw, Path(home))
        except Exception:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
