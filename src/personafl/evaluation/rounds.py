"""What the rows of `metrics.jsonl` come to: where clients failed, which round is best, when a target was reached.

Rounds are counted from 1 here, as on the screen; a closing stage, such as fine-tuning, counts as one more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from personafl.core.types import Better, Row

DIVERGED_ROUNDS, DIVERGED_CLIENTS = 3, 10  # from so many on nobody is expected to come back


def better(a: float, b: float, which: Better = "higher") -> bool:
    """Whether a score is better than another; what is no number is never."""
    return a > b if which == "higher" else a < b


def reached(value: float, target: float, which: Better = "higher") -> bool:
    """Whether a score is as good as a target."""
    return value == target or better(value, target, which)


def divergence(rows: Sequence[Row], clients: int, of: int) -> dict[str, int] | None:
    """How many clients diverged (`clients` of so many) and in which rounds; None where none did.

    `final` are those whose models are not finite in the end, of the clients that are evaluated.
    """
    found = [r["round"] + 1 for r in rows if "diverged" in r or "nonfinite_models" in r]
    if not found:
        return None
    last = next(r for r in reversed(rows) if "personal" in r)
    return {
        "clients": clients,
        "of": of,
        "rounds": len(set(found)),
        "first_round": found[0],
        "last_round": found[-1],
        "final": last.get("nonfinite_models", 0),
    }


def faults(rows: Sequence[Row], faulty: Sequence[int] = ()) -> Row:
    """What went wrong with clients, as far as anything did; `faulty` are the clients a simulation made so.

    `quarantined` counts updates that were not taken, `kept_model` lists the rounds after which the server's model was
    what it had been before, and why.
    """
    refused = [(r["round"] + 1, q) for r in rows for q in r.get("quarantined", ())]
    quarantined = refused and {
        "updates": len(refused),
        "clients": sorted({q["client"] for _, q in refused}),
        "first_round": refused[0][0],
        "last_round": refused[-1][0],
        "why": dict(Counter(q["why"] for _, q in refused).most_common()),
    }
    kept = [{"round": r["round"] + 1, "why": r["kept_model"]} for r in rows if "kept_model" in r]
    counted = {name: sum(r.get(name, 0) for r in rows) for name in ("dropped", "busy", "late", "stale")}
    found = {"faulty_clients": list(faulty), "quarantined": quarantined, **counted, "kept_model": kept}
    return {k: v for k, v in found.items() if v}


def by_validation(rows: Sequence[Row], which: Better = "higher") -> Row | None:
    """The first of the evaluated rounds with the best mean on validation data, and the last; None without such data."""
    scored = [r for r in rows if "validation" in r]
    if not scored:
        return None
    best = _best(scored, which)
    return (
        {"best_round": best["round"] + 1}
        | _told(best)
        | {"last": {"round": scored[-1]["round"] + 1} | _told(scored[-1])}
    )


def _best(scored: Sequence[Row], which: Better) -> Row:
    best = scored[0]
    for r in scored[1:]:
        if better(r["validation"]["mean"], best["validation"]["mean"], which):
            best = r
    return best


def _told(row: Row) -> Row:
    return {"validation": row["validation"], "personal": row["personal"]}


def to_target(
    rows: Sequence[Row], targets: Sequence[float], which: Better = "higher"
) -> dict[str, dict[str, int | None]]:
    """The first evaluated round in which clients' own models, and the global one, reach each target in the mean.

    None where no round does, and where there is no global model.
    """

    def first(model: str, target: float) -> int | None:
        means = ((r["round"] + 1, r[model]["mean"]) for r in rows if r.get(model))
        return next((t for t, mean in means if reached(mean, target, which)), None)

    return {str(t): {model: first(model, t) for model in ("personal", "global")} for t in targets}


def stopped_on(rows: Sequence[Row]) -> str:
    """The data that decided when to stop: validation data, test data where there are none, or those of training."""
    if any(r.get("stopped") == "diverged" for r in rows):
        return "training"
    return "validation" if any("validation" in r for r in rows) else "test"


def everybody_diverged(rows: Sequence[Row], clients: int) -> bool:
    """Whether everybody's training diverged in the last three rounds that had any, so that more rounds change nothing.

    These must have had ten different clients, or all `clients` of the federation where there are fewer: with small
    cohorts, a few clients with odd data do not end a run. The server's model has not changed in these rounds.
    """
    different: set[int] = set()
    trained = [r for r in rows if r.get("clients")]
    for count, r in enumerate(reversed(trained), 1):
        if r.get("diverged", 0) < r["clients"]:
            return False
        different |= {q["client"] for q in r.get("quarantined", ())}
        if count >= DIVERGED_ROUNDS and len(different) >= min(clients, DIVERGED_CLIENTS):
            return True
    return False


def stop(rows: Sequence[Row], patience: int, target: float | None, clients: int, which: Better = "higher") -> str:
    """Why training ends after the last of these rows: `diverged`, `target` or `patience`; empty where it goes on."""
    if everybody_diverged(rows, clients):
        return "diverged"
    if not rows or "personal" not in rows[-1]:
        return ""
    last = rows[-1].get("validation") or rows[-1]["personal"]
    if target is not None and reached(last["mean"], target, which):
        return "target"
    scored = [r for r in rows if "validation" in r]
    if patience and scored:
        since = len(scored) - 1 - next(i for i, r in enumerate(scored) if r is _best(scored, which))
        return "patience" if since >= patience else ""
    return ""
