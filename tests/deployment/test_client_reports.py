"""What clients tell of the columns of their tables: all agree on categories, so that features are a simulation's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from personafl.core.errors import UserError
from personafl.data.columns import Column, unite_columns
from personafl.deployment import client_reports, load_model, local_data
from personafl.deployment.client_reports import Described, find_excess
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.federation_spec import Form, World, read_recipe
from personafl.deployment.local_model import MODEL
from personafl.deployment.messages import Failure, Reply, Request
from personafl.deployment.settings import ClientSettings
from tests.deployment import worlds
from tests.deployment.worlds import InProcess

WARDS = ("east,north", "north,west", "west", "east,south")  # that the clients c0 to c3 have
FEATURES = ("age", "ward=east", "ward=north", "ward=south", "ward=west", "dose")


def write(home: Path, client: int, wards: str = "", rows: int = 16) -> None:
    """A client's table; the second client has its columns in another order."""
    draw = np.random.default_rng(client)
    kinds = (wards or WARDS[client]).split(",")
    lines = [(f"{draw.random():.3f}", kinds[i % len(kinds)], f"{draw.random():.3f}", str(i % 3)) for i in range(rows)]
    names = ("age", "ward", "dose", "label")
    order = (2, 3, 1, 0) if client == 1 else (0, 1, 2, 3)
    (home / f"c{client}").mkdir(parents=True, exist_ok=True)
    text = "\n".join(",".join(cells[i] for i in order) for cells in (names, *lines))
    (home / f"c{client}" / "a.csv").write_text(text)


def recipe(home: Path, **data: Any) -> str:
    table = {"dataset": str(home), "partition": "natural", "num_clients": 4, **data}
    text = worlds.recipe("ditto", data=table, training={"num_rounds": 2, "join_ratio": 1.0, "batch_size": 4})
    return text.replace("alpha = 0.3\n", "")


def wards(tmp_path: Path, spoil: worlds.Spoil | None = None, **settings: Any) -> tuple[Coordinator, InProcess]:
    for client in range(4):
        write(tmp_path / "wards", client)
    server, transport = worlds.deployed(recipe(tmp_path / "wards"), tmp_path, spoil=spoil, **settings)
    for node in transport.held.values():
        node.settings = dataclasses.replace(node.settings, data=str(tmp_path / "wards" / node.settings.id))
    return server, transport


def test_a_run_over_tables_with_text_is_that_of_a_simulation(tmp_path: Path) -> None:
    server, _ = wards(tmp_path)
    server.run()
    sim = worlds.simulated(recipe(tmp_path / "wards"))
    assert server.world is not None and sim.federation.source.feature_names == FEATURES
    form = server.world.form
    assert form.feature_names == FEATURES and form.shape == (6,)
    worlds.same_run(server, tmp_path, sim)
    made = read_recipe(server.recipe)
    for n in range(4):
        found = local_data.load(ClientSettings(id="c", data=str(tmp_path / "wards" / f"c{n}")), made, n)
        fitted = found.fitted(form, server.world.normalize())
        for part in ("train", "test"):
            theirs = sim.federation.source.x[sim.federation.rows(part, n)]  # type: ignore[arg-type]
            assert torch.equal(fitted.source.x[fitted.rows[part]].double(), theirs)  # type: ignore[index]
    model = load_model(tmp_path / "c2" / server.experiment / "c2" / MODEL)
    assert model.feature_names == FEATURES
    assert model.categories == {"ward": ("east", "north", "south", "west")}
    assert model.predict(torch.zeros(3, 6)).shape == (3, 3)


@pytest.mark.parametrize("missing", ["zero", "refuse"])
def test_missing_categories_are_those_of_a_simulation(missing: str, tmp_path: Path) -> None:
    """With data.missing=zero a missing category is 0 in all features of its column."""
    home = tmp_path / "wards"
    for client in range(4):
        write(home, client)
    path = home / "c0" / "a.csv"
    if missing == "zero":
        path.write_text(path.read_text().replace("north", "NA"))
    text = recipe(home, missing=missing)
    fed = worlds.simulation(text).federation
    form = local_data.load(ClientSettings(id="c", data=str(home / "c1")), read_recipe(text), 1).form()
    forms = [
        local_data.load(ClientSettings(id="c", data=str(home / f"c{n}")), read_recipe(text), n).form() for n in range(4)
    ]
    agreed = form.with_columns(unite_columns([f.columns for f in forms if f.columns is not None]))
    found = local_data.load(ClientSettings(id="c", data=str(home / "c0")), read_recipe(text), 0).fitted(agreed, None)
    assert torch.equal(found.source.x[found.rows["train"]].double(), fed.source.x[fed.rows("train", 0)].double())


def test_a_client_that_comes_later_with_another_category_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, transport = wards(tmp_path, start=3)
    transport.online.discard(103)
    worlds.before_stages(server, {0: lambda: transport.online.add(103)})
    server.run()
    assert [m.name for m in server.roster.members] == ["c0", "c1", "c2"]
    assert "its column 'ward' has the value 'south', which is none of those agreed on" in caplog.text
    replies = [r for n, q, r in transport.log if n == 103 and q.kind == "describe"]
    assert replies and not any("south" in str(r) for r in replies)


def test_a_category_that_comes_during_a_run_is_an_error_at_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out until the row is gone, and then gets its model."""
    server, _ = wards(tmp_path)
    path = tmp_path / "wards" / "c2" / "a.csv"
    whole = path.read_text()
    worlds.before_stages(
        server, {1: lambda: path.write_text(whole + "\n0.5,cellar,0.5,1"), -1: lambda: path.write_text(whole)}
    )
    server.run()
    assert "its column 'ward' has the value 'cellar', which is none of those agreed on" in caplog.text
    rows = server.results.rows()
    assert [f["client"] for row in rows for f in row.get("failed", [])] == [2] and server.state.finished


# What a client tells

TABLE = Form(
    (3,),
    "float32",
    "classification",
    (),
    2,
    None,
    ("age", "ward=a", "ward=b"),
    "mlp",
    (Column("age"), Column("ward", ("a", "b"))),
)


@pytest.mark.parametrize(
    "change",
    [
        {"columns": 5},
        {"columns": []},
        {"columns": [["age", None]]},
        {"columns": [["age", None], ["ward", ["b", "a"]]]},
        {"columns": [["age", None], ["ward", ["a", "a"]]]},
        {"columns": [["age", None], ["ward", "ab"]]},
        {"columns": [["age", None], ["ward", ["a", 5]]]},
        {"columns": [["age", None], ["ward", []]]},
        {"columns": [["age", None], ["x" * 257, ["a", "b"]]]},
        {"columns": [["age", None, 1], ["ward", ["a", "b"]]]},
        {"columns": [["age", None], ["other", ["a", "b"]]]},
        {"columns": [["age", None], ["age", None], ["age", None]], "feature_names": ["age"] * 3},
        {"shape": [4]},
        {"shape": [3, 1]},
        {"feature_names": None},
        {
            "columns": [["ward", [f"{i:04d}" for i in range(1001)]]],
            "feature_names": [f"ward={i:04d}" for i in range(1001)],
            "shape": [1001],
        },
    ],
)
def test_columns_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    told = json.loads(json.dumps(dataclasses.asdict(TABLE)))
    assert Form.read(told) == TABLE
    world = World("e", "1", "", 4, 100, TABLE, None)
    assert World.read(json.loads(json.dumps(world.told()))) == world
    with pytest.raises(UserError, match="not a description of examples"):
        Form.read(told | change)


def test_what_columns_differ_in_is_told() -> None:
    def like(*columns: Column) -> Form:
        return TABLE.with_columns(columns)

    ward = Column("ward", ("c",))
    assert like(ward, Column("age")).unlike(TABLE) == ""  # order and categories may be others
    assert like(ward).unlike(TABLE) == "no column 'age', which others have"
    assert like(Column("age"), ward, Column("x")).unlike(TABLE) == "column 'x', which others do not have"
    why = "numbers in column 'ward', where others have text"
    assert like(Column("age"), Column("ward")).unlike(TABLE) == why
    assert dataclasses.replace(TABLE, columns=None).unlike(TABLE).startswith("columns None, others have")


def described(categories: list[str]) -> Described:
    form = TABLE.with_columns((Column("age"), Column("ward", tuple(sorted(categories)))))
    return Described(form, {"train": 1, "validation": 0, "test": 1}, "none", None, None)


def agreed_by(held: dict[int, Described]) -> Form:
    return TABLE.with_columns(unite_columns([d.form.columns or () for d in held.values()]))


def test_who_tells_too_many_categories_is_the_one_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {0: described(["a", "b"]), 1: described([f"{i:03d}" for i in range(999)]), 2: described(["a"])}
    assert find_excess(held, agreed_by(held)) == (1, "too many categories in column 'ward' beside those of the others")
    held[1] = described([f"{i:03d}" for i in range(998)])
    assert find_excess(held, agreed_by(held)) is None  # a thousand in all
    monkeypatch.setattr(client_reports, "MOST_NAMES", 998 * len("ward=000"))
    assert find_excess(held, agreed_by(held)) == (
        1,
        "too many or too long labels and categories beside those of the others",
    )


def test_a_client_that_makes_up_categories_does_not_keep_others_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    junk = Column("ward", tuple(f"{i:04d}" for i in range(1000)))

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply | Failure:
        reply = answer(request)
        if node != 100 or request.kind != "describe":
            return reply
        form = Form.read(reply.told["form"]).with_columns((Column("age"), junk, Column("dose")))
        return Reply(json.loads(json.dumps(reply.told | {"form": dataclasses.asdict(form)})))

    server, _ = wards(tmp_path, spoil=spoil, start=3)
    server.run()
    assert "client c0 is not used: too many categories in column 'ward'" in caplog.text
    assert [m.name for m in server.roster.members] == ["c1", "c2", "c3"] and server.state.finished
