"""The ClientApp: who it is, and what it says to messages that are none of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

from personafl.core.errors import UserError
from personafl.deployment.flower import client_app
from personafl.deployment.flower.in_process import RUN, InProcessGrid
from personafl.deployment.flower.records import from_records, to_records


def context(node: dict[str, str | int], run: dict[str, str] | None = None) -> Context:
    return Context(RUN, 1, node, RecordDict(), run or {})  # type: ignore[arg-type]


def test_a_node_is_what_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_text('[client]\nid = "ward-3"\ndata = "data"\n')
    found = client_app.client_settings(context({"client": str(path)}))
    assert (found.id, found.data, found.state) == ("ward-3", str(tmp_path / "data"), str(tmp_path / "state"))


def test_in_flower_s_simulation_a_node_is_a_client_of_the_recipe(tmp_path: Path) -> None:
    found = client_app.client_settings(context({"partition-id": 3, "num-partitions": 5}, {"folder": str(tmp_path)}))
    assert (found.id, found.data, found.state) == ("client-3", "recipe:3", str(tmp_path / "nodes"))


def test_without_either_it_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"must name a client\.toml"):
        client_app.client_settings(context({}))


@pytest.mark.parametrize("content", [RecordDict(), to_records({"experiment": "e"}, ())])
def test_what_cannot_be_answered_is_told_without_saying_why(content: RecordDict, tmp_path: Path) -> None:
    """A file that is not there has a path, and paths tell something of a machine."""
    node = {"client": str(tmp_path / "secret.toml")}
    grid = InProcessGrid(client_app.app, {1: node}, {})
    (number,) = grid.push_messages([Message(content, dst_node_id=1, message_type="query.hello")])
    (reply,) = grid.pull_messages([number])
    told, blobs = from_records(reply.content)
    assert told == {"error": "its client.toml cannot be used, or the message; its log has why"} and not blobs
