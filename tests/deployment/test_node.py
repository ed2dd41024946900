"""A client's answers: the same to the same request, an error to any other, and nothing outside of its folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from personafl.core import wire
from personafl.deployment.federation_spec import FORMAT
from personafl.deployment.messages import Kind, Reply, Request
from personafl.deployment.node import Node
from personafl.deployment.settings import ClientSettings
from personafl.deployment.stored_split import StoredSplit
from personafl.storage import files
from personafl.storage.lock import locked
from tests.deployment import worlds

SMALL = "tests.deployment.test_server_files:Small"


def everything(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("method", ["ditto", "dm-pfl", "fedpews"])
def test_a_repeated_request_has_the_same_reply_byte_for_byte(method: str, tmp_path: Path) -> None:
    """And leaves the same files, whatever was done in between."""
    text = worlds.recipe(method, training={"num_rounds": 3})
    seen = 0

    def twice(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        nonlocal seen
        first, held = answer(request), everything(tmp_path / f"c{node - 100}")
        second = answer(request)
        assert first == second and everything(tmp_path / f"c{node - 100}") == held
        seen += request.kind == "work"
        return second

    server, _ = worlds.deployed(text, tmp_path, spoil=twice)
    server.run()
    assert seen >= 6
    worlds.same_run(server, tmp_path, worlds.simulated(text))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Request]:
    """A request of each kind."""
    root = tmp_path_factory.mktemp("asked")
    with pytest.MonkeyPatch.context() as patch:
        worlds.quicken(patch)
        server, transport = worlds.deployed(
            worlds.recipe("ditto", training={"num_rounds": 1}, model={"name": SMALL}), root
        )
        server.run()
    return {r.kind: r for n, r, _ in transport.log if n == 100 and (r.kind != "work" or r.told["plays"])}


def started(root: Path, data: str = "recipe:0") -> Node:
    return Node(ClientSettings(id="c0", data=data, state=str(root / "state"), threads=1))


GARBAGE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**63, 10**400, 0.5, float("nan"), float("inf")])
    | st.sampled_from(["", "../x", "/etc/x", "a/b", "..", "x" * 300, "\x00", "e\n", "newcomer", "kept"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
PLACES = [
    *("experiment", "number", "begin", "acknowledged", "world", "plays", "evaluate", "close", "given", "recipe"),
    *("world.recipe", "world.form", "world.init", "world.clients", "world.examples", "world.normalization"),
    *("world.format", "world.outputs"),
    *("plays.position", "plays.stage", "plays.down", "plays.lr", "plays.judged"),
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["hello", "describe", "work"]), place=st.sampled_from(PLACES), value=GARBAGE)
def test_any_request_is_answered_and_no_file_is_touched_elsewhere(
    asked: dict[str, Request], kind: str, place: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("node")
    (root / "own.txt").write_text("mine")
    request = asked[kind]
    told = dict(request.told)
    first, _, rest = place.partition(".")
    if not rest:
        told[first] = value
    elif first == "plays" and "plays" in told:
        told["plays"] = [*told["plays"][:-1], told["plays"][-1] | {rest: value}]
    elif first in told:
        told[first] = told[first] | {rest: value}
    reply = started(root).answer(dataclasses.replace(request, told=told))
    assert isinstance(reply, Reply)
    outside = [p for p in root.rglob("*") if p.is_file() and root / "state" not in p.parents]
    assert outside == [root / "own.txt"]
    inside = {p.relative_to(root / "state").parts for p in (root / "state").rglob("*") if p.is_file()}
    assert all(parts[1] == "c0" for parts in inside)


@pytest.mark.parametrize(
    "experiment", ["../x", "/tmp/x", "..", "", "a/b", "a\\b", ".hidden", "x" * 65, "a\n", 5, None, ["a"], True]
)
def test_an_experiment_is_a_name(experiment: Any, tmp_path: Path) -> None:
    reply = started(tmp_path).answer(Request("hello", {"experiment": experiment}))
    assert reply.told["error"].endswith(": not a name") and not list(tmp_path.rglob("*/*"))


@pytest.mark.parametrize("blob", [b"", b"PFL9", wire.pack({})[:-1]])
def test_a_blob_that_is_none_is_an_error(blob: bytes, asked: dict[str, Request], tmp_path: Path) -> None:
    reply = started(tmp_path).answer(dataclasses.replace(asked["work"], blobs=(blob,)))
    assert reply.told.keys() == {"error"}


def test_other_first_weights_are_refused(asked: dict[str, Request], tmp_path: Path) -> None:
    request = asked["work"]
    told = request.told | {"world": request.told["world"] | {"init": "0" * 16}}
    reply = started(tmp_path).answer(dataclasses.replace(request, told=told))
    assert reply.told["error"].startswith("the first weights differ: ")


def test_work_of_another_format_is_refused(asked: dict[str, Request], tmp_path: Path) -> None:
    """Before anything is made of it: its fields may be others."""
    request = asked["work"]
    world = request.told["world"] | {"format": FORMAT + 1, "version": "9.9", "unheard": "of"}
    for told in (request.told | {"world": world}, asked["describe"].told | {"format": FORMAT + 1, "version": "9.9"}):
        kind: Kind = "work" if "world" in told else "describe"
        error = started(tmp_path).answer(Request(kind, told, request.blobs)).told["error"]
        assert f"has format {FORMAT + 1} (personafl '9.9') and this is personafl" in error
        assert f"with format {FORMAT}; install versions of the same format" in error


def test_a_full_disk_loses_nothing(asked: dict[str, Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(tmp_path)
    first = node.answer(asked["work"])
    held = everything(tmp_path)

    def full(path: Path, data: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        later = [p | {"position": 1} for p in asked["work"].told["plays"]]
        reply = node.answer(dataclasses.replace(asked["work"], told=asked["work"].told | {"plays": later}))
    assert reply.told == {"error": "No space left on device"}
    assert everything(tmp_path) == held
    assert node.answer(asked["work"]) == first


def test_sessions_made_up_for_are_counted_and_may_diverge(asked: dict[str, Request], tmp_path: Path) -> None:
    """A stage that was missed and diverges leaves the client what it had; the work of all is added up."""
    request = asked["work"]
    (play,) = request.told["plays"]
    one = started(tmp_path / "a").answer(request)
    bad = play | {"lr": 1e300}
    told = request.told | {"plays": [bad, play]}
    two = started(tmp_path / "b").answer(dataclasses.replace(request, told=told))
    assert two.blob == one.blob
    assert two.told["work"]["flops"] == 2 * one.told["work"]["flops"] > 0
    assert two.told["work"]["loss"] == one.told["work"]["loss"]
    alone = started(tmp_path / "c").answer(dataclasses.replace(request, told=request.told | {"plays": [bad]}))
    assert "is not finite" in alone.told["diverged"] and not alone.blob
    assert not list((tmp_path / "c").rglob("kept-*"))


def test_what_the_lock_or_the_labels_tell_stays_at_the_client(
    asked: dict[str, Request], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = started(tmp_path)
    request = asked["work"]
    home = tmp_path / "state" / request.told["experiment"] / "c0"
    home.mkdir(parents=True, exist_ok=True)
    with locked(home):
        assert node.answer(request).told == {"error": "another process is at work for this client"}
    assert str(home) in caplog.text  # who is, is said in its own log
    world = request.told["world"]
    other = world | {"form": world["form"] | {"classes": 3}}
    assert node.answer(dataclasses.replace(request, told=request.told | {"world": other})).told.keys() == {"error"}


def ward() -> Any:
    x, y = np.arange(24, dtype=np.float32).reshape(12, 2), np.array(["well", "patient 4711"] * 6)
    return (x[:8], y[:8]), (x[8:], y[8:])


def test_a_label_that_others_do_not_have_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = worlds.recipe("fedavg", training={"num_rounds": 1}, data={"normalize": "none"})
    server, transport = worlds.deployed(text, tmp_path, count=1, clients=1)
    node = transport.held[100]
    node.settings = dataclasses.replace(node.settings, data="tests.deployment.test_node:ward")
    server.run()
    assert server.state.finished and server.world is not None
    other = dataclasses.asdict(server.world.form) | {"class_names": ["well", "unwell"]}
    work = next(r for _, r, _ in transport.log if r.kind == "work")
    told = {"experiment": server.experiment, "recipe": text, "number": 0, "form": other, "format": FORMAT}
    described = Request("describe", told)
    for asked in (
        described,
        dataclasses.replace(work, told=work.told | {"world": work.told["world"] | {"form": other}}),
    ):
        caplog.clear()
        assert node.answer(asked) == Reply({"error": "its data cannot be used; its log has why"})
        assert "its label 'patient 4711' is none of those agreed on" in caplog.text


def test_rows_that_come_during_a_run_leave_the_others_in_their_part(tmp_path: Path) -> None:
    """Forty rows more from the second stage on: the twenty test rows stay test rows, and ten are drawn beside them."""
    draw = np.random.default_rng(0)
    x, y = draw.random((120, 4), np.float32), np.arange(120) % 3
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 3}, data={"validation_share": 0.0})
    server, transport = worlds.deployed(text, tmp_path, count=2, clients=2)
    for i, node in enumerate(transport.held.values()):
        (tmp_path / f"data{i}").mkdir()
        np.savez(tmp_path / f"data{i}" / "a.npz", x=x[: 80 + i], y=y[: 80 + i])
        node.settings = dataclasses.replace(node.settings, data=str(tmp_path / f"data{i}"))
    splits: list[StoredSplit | None] = []

    def grow() -> None:
        splits.append(StoredSplit.read(tmp_path / "c0" / server.experiment / "c0" / "split"))
        np.savez(tmp_path / "data0" / "a.npz", x=x[::-1], y=y[::-1])

    worlds.before_stages(server, {1: grow})
    server.run()
    before, after = splits[0], StoredSplit.read(tmp_path / "c0" / server.experiment / "c0" / "split")
    assert before is not None and after is not None
    assert (len(before.parts["train"]), len(before.parts["test"])) == (60, 20)
    assert (len(after.parts["train"]), len(after.parts["test"])) == (90, 30)
    for part in ("train", "test"):
        assert after.parts[part][: len(before.parts[part])] == before.parts[part]
    assert [m.sizes["train"] for m in server.roster.members] == [90, 61] and server.state.finished


def test_a_damaged_split_is_told_to_the_client_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = worlds.recipe("fedavg")
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "a.npz", x=np.eye(8, dtype=np.float32), y=np.arange(8) % 2)
    node = Node(ClientSettings(id="c0", data=str(tmp_path / "data"), state=str(tmp_path / "state"), threads=1))
    request = Request("describe", {"experiment": "e-1", "recipe": text, "number": 0, "format": FORMAT})
    assert node.answer(request).told["sizes"] == {"train": 6, "validation": 0, "test": 2}
    assert not list((tmp_path / "state").rglob("split"))  # numbers may change until the first round
    (tmp_path / "state" / "e-1" / "c0" / "split").write_bytes(b"")
    assert node.answer(request) == Reply({"error": "its data cannot be used; its log has why"})
    assert "the file is damaged" in caplog.text
