"""`personafl deploy status` and `collect`: what the folder holds and what the SuperLink tells."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from personafl.core.errors import UserError
from personafl.core.plain_text import count, harmless
from personafl.core.table import Table
from personafl.deployment.flower import control, expiry
from personafl.deployment.flower.folder import Folder
from personafl.evaluation.run_records import read_rounds

MIB = 2**20


def status(folder: Folder) -> dict[str, Any]:
    """Nodes, the last run and its position, as far as they are known."""
    up = control.is_up(folder)
    runs = control.runs(folder) if up else []
    return {
        "server": "running" if up else "not running",
        "nodes": _nodes(folder) if up else [],
        "run": _run(runs[0]) if runs else None,
        "position": _position(folder),
        "server_app": _server_app(folder, under_way=bool(runs) and not runs[0].finished),
        "certificates": _certificates(folder),
    }


def status_lines(found: dict[str, Any]) -> list[str]:
    """A status in words."""
    lines = [f"server   {found['server']}"]
    lines += [f"keys     {c['warning']}" for c in found["certificates"] if c["warning"]]
    online = [n for n in found["nodes"] if n["status"] == "online"]
    if found["server"] == "running":
        lines.append(f"nodes    {len(online)} of {len(found['nodes'])} online")
        lines += [f"         {n['name']}: {n['status']} (node {n['node']})" for n in found["nodes"]]
    if run := found["run"]:
        why = f": {run['details']}" if run["status"] == "finished:failed" else ""
        lines.append(f"run      {run['id']}, {run['status']}{why}, {run['seconds']:.0f} s")
        sent = f"{run['inbound_bytes']:,} bytes from nodes, {run['outbound_bytes']:,} to them"
        lines.append(f"traffic  {sent}, by Flower's report")
    elif found["server"] == "running":
        lines.append("run      none yet; personafl deploy start begins one")
    app = found["server_app"]
    if app.get("waits"):
        lines.append(harmless(f"waits    {app['waits']}"))
    named = {n["node"]: n["name"] for n in found["nodes"]}
    for node, why in app.get("unused", {}).items():
        lines.append(harmless(f"unused   {named.get(node, f'node {node}')}: {why}"))
    if at := found["position"]:
        scored = f", accuracy {at['personal']:.3f}" if at["personal"] is not None else ""
        done = f"{app['stage']} of {app['stages']} stages are" if app.get("stages") else "a stage is"
        lines.append(f"rounds   {done} done; scores are known up to round {at['round']}, {at['phase']}{scored}")
    if without := app.get("rounds_without_update"):
        lines.append(f"         {_without_update(without)}")
    return lines


def _without_update(rounds: int) -> str:
    return f"{count(rounds, 'round')} had no update and left the model as it was; logs/rounds.log has the reasons"


def collect(folder: Folder) -> dict[str, Any]:
    """Results of a deployment: every client's final metrics, the summary, bytes by our count and by Flower's."""
    summary, clients = folder.results / "summary.json", folder.results / "clients.csv"
    runs = control.runs(folder) if control.is_up(folder) else None
    under_way = next((r.id for r in runs or () if not r.finished), None)
    if not summary.is_file():
        app = _server_app(folder, under_way=under_way is not None)
        done = f"{app['stage']} of {app['stages']} stages are done" if app.get("stages") else "no stage is done"
        now = f"run {under_way} is under way" if under_way else "no run is under way, personafl deploy start begins one"
        raise UserError(f"{summary}: no such file: {done}; {now}; see personafl deploy status")
    try:
        told = json.loads(summary.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{summary}: not a summary of a run: {e}") from None
    if not isinstance(told, dict):
        raise UserError(f"{summary}: not a summary of a run: it is no table")
    return {
        "summary": told,
        "under_way": under_way,
        "clients": _clients(clients) if clients.is_file() else [],
        "flower": None if runs is None else _traffic(runs),
    }


def client_table(found: dict[str, Any]) -> Table:
    """The final metrics, a row for each client."""
    rows = found["clients"]
    columns = list(rows[0]) if rows else []
    return Table(columns, [[_cell(row[name]) for name in columns] for row in rows], "lr")


def collect_lines(found: dict[str, Any]) -> list[str]:
    """What stands below the table: the means, and bytes by both counts."""
    summary = found["summary"]
    metric = summary.get("metric", {}).get("name", "accuracy")
    scores, final = _means(summary.get("accuracy")), _means(summary.get("final"))
    clients = count(summary["final"].get("clients", 0), "client") if final else ""
    lines = [
        f"{metric}, {kind}: {_cell(mean)} (mean over the final models of {clients})" for kind, mean in final.items()
    ]
    for kind, mean in scores.items():
        if mean != final.get(kind):
            of = "mean over newcomers" if kind == "unseen" else "mean over clients, as the recipe evaluates"
            lines.append(f"{metric}, {kind}: {_cell(mean)} ({of})")
    without = summary.get("rounds_without_update", {})
    if without.get("count"):
        lines.append(_without_update(without["count"]))
    if why := summary.get("not_completed"):
        lines.append(harmless(f"The run is not completed. {why}"))
    if found["under_way"]:
        lines.insert(0, f"run {found['under_way']} is under way: these are results from before it")
    sent = summary.get("communication", {})
    up, down = sent.get("up_bytes"), sent.get("down_bytes")
    if up is not None and down is not None:
        lines.append(f"sent, our count:        {up:>14,} bytes up, {down:>14,} bytes down")
    flower = found["flower"]
    if flower is None:
        lines.append("sent, Flower's report: not known; the server is not running")
        return lines
    inbound, outbound = flower["inbound_bytes"], flower["outbound_bytes"]
    runs = "1 run" if flower["runs"] == 1 else f"{flower['runs']} runs"
    lines.append(
        f"sent, Flower's report:  {inbound:>14,} bytes up, {outbound:>14,} bytes down, framing included, over {runs}"
    )
    if up and down:
        lines.append(f"Flower's over ours:     {inbound / up:>14.3f} up,       {outbound / down:>14.3f} down")
    return lines


def _means(scores: Any) -> dict[str, float]:
    """The means of a part of the summary."""
    return {k: v["mean"] for k, v in dict(scores or {}).items() if isinstance(v, dict) and "mean" in v}


def _certificates(folder: Folder) -> list[dict[str, Any]]:
    """Until when the server's certificates are valid, and what to say of those that expire soon."""
    now = expiry.utc_now()
    return [
        {"name": c.name, "expires": c.expires.isoformat(), "days_left": c.days_left(now), "warning": c.warning(now)}
        for c in expiry.server_certificates(folder)
    ]


def _nodes(folder: Folder) -> list[dict[str, str]]:
    """Registered nodes with the best name known for each: the client's own, or that of its key."""
    named = {node: name for name, node in control.registered(folder).items()}
    named |= _roster(folder)
    found = [(node, state) for node, state in control.nodes(folder).items() if state != "unregistered"]
    return [{"node": n, "name": harmless(named.get(n, "?")), "status": state} for n, state in found]


def _roster(folder: Folder) -> dict[str, str]:
    """Clients' names by node id, from the server app's roster: a list of clients with `name` and `node`."""
    if not folder.roster.is_file():
        return {}
    try:
        held = json.loads(folder.roster.read_text(encoding="utf-8"))
        return {str(c["node"]): str(c["name"]) for c in held["clients"] if c.get("node") is not None}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{folder.roster}: not a roster of clients") from None


def _server_app(folder: Folder, under_way: bool) -> dict[str, Any]:
    """How far the server app is, and, of a run under way, what it waits for and whom it does not use."""
    try:
        held = json.loads(folder.roster.read_text(encoding="utf-8"))
        unused = {str(n): str(why) for n, why in dict(held.get("unused", {})).items()}
        now = {"waits": str(held.get("waits", "")), "unused": unused} if under_way else {"waits": "", "unused": {}}
        return now | {n: int(held.get(n, 0)) for n in ("stage", "stages", "rounds_without_update")}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _clients(file: Path) -> list[dict[str, Any]]:
    """The rows of `clients.csv`, whose clients have names; what is a number is one."""
    with file.open(encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f, restkey="?", restval=""))
    return [{name: _number(value) for name, value in row.items()} for row in rows]


def _number(text: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except (ValueError, TypeError):
            continue
    return str(text)


def _run(run: control.Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "status": run.status,
        "details": run.details,
        "seconds": run.seconds,
        "inbound_bytes": run.inbound,
        "outbound_bytes": run.outbound,
    }


def _traffic(runs: list[control.Run]) -> dict[str, int]:
    """Bytes over all runs, of which a deployment has several where it was resumed."""
    return {
        "runs": len(runs),
        "inbound_bytes": sum(r.inbound for r in runs),
        "outbound_bytes": sum(r.outbound for r in runs),
    }


def _position(folder: Folder) -> dict[str, Any] | None:
    """The last round whose row is written, and its scores."""
    file = folder.results / "metrics.jsonl"
    whole = file.read_bytes().rfind(b"\n") + 1 if file.is_file() else 0  # a line may be being written
    rows = read_rounds(file, whole) if whole else []
    if not rows:
        return None
    scored = [row["personal"]["mean"] for row in rows if "personal" in row]
    last = rows[-1]
    return {
        "round": last["round"],
        "phase": last["phase"],
        "personal": scored[-1] if scored else None,
    }


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else harmless(str(value))
