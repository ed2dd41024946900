"""What is said below a comparison: what its columns are, what went wrong, and what its runs were asked for besides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean

from personafl.core.types import Summary
from personafl.evaluation.comparison_table import columns, groups, mean_with_spread, spread_of
from personafl.evaluation.metric_format import Shown

Missing = Sequence[tuple[str, int]]
"""Methods and seeds a comparison was asked for and has not."""


def note(summaries: Sequence[Summary], spread: str | None = None) -> str:
    """What the columns are, below the table."""
    kind, counts = spread_of(summaries, spread), sorted({len(seeds) for seeds in groups(summaries).values()})
    seeds = "seeds" if not counts else f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]}–{counts[-1]} seeds"
    few = ", too few for an interval" if spread is None else ""
    over = {
        "clients": "deviation over clients",
        "std": f"standard deviation over {seeds}{few}",
        "ci": f"95 % interval over {seeds}",
    }[kind]
    chosen = "By validation: at the evaluated round with the best validation score. "
    return (
        f"{Shown.of(summaries).heading}, mean ± {over}. {chosen if 'By validation' in columns(summaries) else ''}"
        "Average: over all degrees of shift. Worst: of all clients. MiB (up + down) and GFLOP per client and run."
    )


def alerts(summaries: Sequence[Summary], missing: Missing = ()) -> list[str]:
    """Why the table is not what it looks like: runs that are missing, that diverged, or that left updates out."""
    found = []
    if missing:
        by_label: dict[str, list[int]] = {}
        for label, seed in missing:
            by_label.setdefault(label, []).append(seed)
        told = ", ".join(f"{n} (seed{'s' * (len(s) > 1)} {', '.join(map(str, s))})" for n, s in by_label.items())
        whole = len({*missing, *((s["label"], s["seed"]) for s in summaries)})
        found.append(f"Partial: {len(missing)} of {whole} runs are not finished: {told}.")
    for seeds in groups(summaries).values():
        if wild := [s for s in seeds if "diverged" in s]:
            found.append(_diverged(wild, len(seeds)))
        found += _quarantined([s for s in seeds if "faults" in s])
    return found


def _diverged(wild: Sequence[Summary], seeds: int) -> str:
    """A line about a method, from the summaries of the seeds that diverged."""
    told = [s["diverged"] for s in wild]
    clients, final = max(d["clients"] for d in told), max(d["final"] for d in told)
    which = f" in seed{'s' * (len(wild) > 1)} {', '.join(str(s['seed']) for s in wild)}" if seeds > 1 else ""
    most = "up to " if len(wild) > 1 else ""
    line = (
        f"{wild[0]['label']} diverged{which}: loss or model of {most}{clients} of {told[0]['of']} clients was not "
        f"finite, first in round {min(d['first_round'] for d in told)}; try a learning rate below "
        f"{wild[0]['lr']:g}, or grad_clip."
    )
    if ends := sorted(s["stopped"]["rounds"] for s in wild if has_stopped_diverged(s)):
        when = f"{ends[0]}" if ends[0] == ends[-1] else f"{ends[0]}–{ends[-1]}"
        line += (
            f" Training stopped after round {when}, since no client's training was finite any more; data.normalize "
            "and data.normalize_targets bring inputs and targets to a common scale."
        )
    return f"{line} The final models of {most}{final} clients are not finite and count as wrong." if final else line


def _quarantined(failed: Sequence[Summary]) -> list[str]:
    """A line about the updates of a method that were not taken, over its seeds."""
    told = [s["faults"]["quarantined"] for s in failed if "quarantined" in s["faults"]]
    kept = sum(len(s["faults"].get("kept_model", ())) for s in failed)
    if not told and not kept:
        return []
    why: Counter[str] = Counter()
    for t in told:
        why.update(t["why"])
    reasons = "; ".join(f"{text}, {n} times" if n > 1 else text for text, n in why.most_common(3))
    more = f"; {len(why) - 3} other reasons" if len(why) > 3 else ""
    clients = max((len(t["clients"]) for t in told), default=0)
    most = "up to " if len(told) > 1 else ""
    line = (
        f"{sum(why.values())} updates of {most}{clients} clients were left out, first in round "
        f"{min(t['first_round'] for t in told)} ({reasons}{more})"
        if told
        else ""
    )
    same = f"after {kept} rounds the server's model was what it had been before" if kept else ""
    return [f"{failed[0]['label']}: {'; '.join(filter(None, (line, same)))}."]


def remarks(summaries: Sequence[Summary], spread: str | None = None) -> list[str]:
    """What a run that was asked for more has to say below the table."""
    expected, clean = [], []
    kind, shown = spread_of(summaries, spread), Shown.of(summaries)
    for label, seeds in groups(summaries).items():
        robust = [s.get("robustness", {}) for s in seeds]
        full = [r["expected"]["1.0"] for r in robust if "1.0" in r.get("expected", {})]
        if full:
            expected.append(f"{label} {mean_with_spread(full, kind, shown)}")
        as_it_is = [r["whole_clean"] for r in robust if "whole_clean" in r]
        if as_it_is:
            clean.append(f"{label} {mean_with_spread(as_it_is, kind, shown)}")
    return [
        *_stopped(summaries),
        *_absent(summaries),
        *_targets(summaries),
        *_over_corruptions(summaries, "", kind, shown),
        *([f"Every model on the whole test set: {', '.join(clean)}."] if clean else []),
        *_over_corruptions(summaries, "whole_", kind, shown),
        *([f"Full donor shift, expected over all donors: {', '.join(expected)}."] if expected else []),
        *_executions(summaries),
    ]


def _executions(summaries: Sequence[Summary]) -> list[str]:
    """How clients went through the model: stacked, layer by layer or client by client, and why."""
    labels: dict[str, list[str]] = {}
    for label, seeds in groups(summaries).items():
        for mode in dict.fromkeys(s.get("environment", {}).get("execution") for s in seeds):
            if mode:
                labels.setdefault(mode, []).append(label)
    if len(labels) == 1:
        return [f"The model runs {mode}." for mode in labels]
    return [f"The model of {', '.join(names)} runs {mode}." for mode, names in labels.items()]


CORRUPTED = {"": "", "shift_": ", at full shift", "whole_": ", every model on the whole test set"}
"""Fields of a summary's corruptions by what they begin with, and words for the images these are of."""


def _over_corruptions(summaries: Sequence[Summary], which: str, kind: str, shown: Shown) -> list[str]:
    """The mean over the corruptions and severities that all have, by method."""
    cells, differ = in_common(summaries, which)
    out = []
    for label, seeds in groups(summaries).items():
        tried = [r for s in seeds if (r := s.get("robustness", {})).get(f"{which}corruptions")]
        if tried and cells:
            over = {} if differ else tried[0].get(f"{which}corruption_average", {})
            means = [{"mean": mean(r[f"{which}corruptions"][k][s]["mean"] for k, s in cells)} for r in tried]
            means[0] = over | means[0]
            out.append(f"{label} {mean_with_spread(means, kind, shown)}")
    those = f" all have ({len(cells)})" if differ else ""
    return [f"Mean over corruptions and severities{those}{CORRUPTED[which]}: {', '.join(out)}."] if out else []


def has_stopped_diverged(summary: Summary) -> bool:
    """Whether training stopped early since everybody had diverged."""
    return bool(summary.get("stopped", {}).get("by") == "diverged")


def _stopped(summaries: Sequence[Summary]) -> list[str]:
    """Which methods stopped early, by what, and after how many rounds."""
    told: dict[str, list[str]] = {}
    for label, seeds in groups(summaries).items():
        early = [s["stopped"] for s in seeds if "stopped" in s and not has_stopped_diverged(s)]
        for by, on in dict.fromkeys((s["by"], s["on"]) for s in early):
            ends = sorted(s["stopped"]["rounds"] for s in seeds if s.get("stopped", {}).get("by") == by)
            when = f"{ends[0]}" if ends[0] == ends[-1] else f"{ends[0]}–{ends[-1]}"
            some = "" if len(ends) == len(seeds) else f" ({len(ends)} of {len(seeds)} seeds)"
            told.setdefault(f"training.{by} on {on} data", []).append(f"{label} after {when} rounds{some}")
    return [f"Stopped by {why}: {', '.join(who)}." for why, who in told.items()]


_ABSENT = {"dropped": "vanished", "late": "came late", "stale": "of these were used a round later"}


def _absent(summaries: Sequence[Summary]) -> list[str]:
    """How many results did not arrive in time, by method."""
    out = []
    for label, seeds in groups(summaries).items():
        counts = {words: sum(s.get("faults", {}).get(k, 0) for s in seeds) for k, words in _ABSENT.items()}
        if any(counts.values()):
            out.append(f"{label}: " + ", ".join(f"{n} {words}" for words, n in counts.items() if n))
    return [f"Results of clients: {'; '.join(out)}."] if out else []


def _targets(summaries: Sequence[Summary]) -> list[str]:
    """Rounds to each target, for clients' own models and the global one."""
    targets = dict.fromkeys(t for s in summaries for t in s.get("rounds_to_target", ()))
    out = []
    metric = Shown.of(summaries)
    for model, which in (("personal", ""), ("global", " of the global model")):
        for target in targets:
            cells = {}
            for label, seeds in groups(summaries).items():
                asked = [s["rounds_to_target"][target] for s in seeds if target in s.get("rounds_to_target", ())]
                cells[label] = _reached([a[model] for a in asked])
            if model == "personal" or set(cells.values()) != {"–"}:
                told = ", ".join(f"{label} {cell}" for label, cell in cells.items())
                out.append(f"Rounds to the target {metric.target(float(target))}{which}: {told}.")
    return out


def _reached(seeds: Sequence[int | None]) -> str:
    """The mean round over the seeds that reached a target, and how many did where not all."""
    found = [t for t in seeds if t is not None]
    if not found:
        return "–"
    return f"{round(mean(found), 1):g}" + ("" if len(found) == len(seeds) else f" ({len(found)} of {len(seeds)} seeds)")


def in_common(summaries: Sequence[Summary], which: str) -> tuple[list[tuple[str, str]], bool]:
    """Kinds and severities of corruption that all have who have any, and whether some have more."""
    tried = [cells for s in summaries if (cells := s.get("robustness", {}).get(f"{which}corruptions"))]
    cells = [[(kind, severity) for kind, by in t.items() for severity in by] for t in tried]
    common = [c for c in cells[0] if all(c in other for other in cells)] if cells else []
    return common, any(len(c) > len(common) for c in cells)


def concerns(summaries: Sequence[Summary]) -> list[str]:
    """What a reader of the comparison should be told."""
    found = []
    missing = [n for n in ("local", "fedavg-ft") if n not in {s["algorithm"] for s in summaries}]
    if missing:
        found.append(
            f"no {' and no '.join(missing)} among the methods: without them a personalised method cannot be judged"
        )
    judged = {Shown.of([s]) for s in summaries}
    if len(judged) > 1:
        found.append(f"the runs are judged by {' and '.join(sorted(j.words for j in judged))}: not comparable")
    peeked = [s["label"] for s in summaries if s.get("stopped", {}).get("on") == "test"]
    if peeked:
        which = ", ".join(dict.fromkeys(peeked))
        found.append(
            f"{which} stopped by the score on test data: set data.validation_share to stop without a look at test data"
        )
    have = {label: sorted({s["seed"] for s in of}) for label, of in groups(summaries).items()}
    if len(set(map(tuple, have.values()))) > 1:
        told = "; ".join(f"{label}: {', '.join(map(str, seeds))}" for label, seeds in have.items())
        found.append(f"the methods do not have the same seeds ({told}); their means are over different runs")
    by_seed: dict[int, list[Summary]] = {}
    for s in summaries:
        by_seed.setdefault(s["seed"], []).append(s)
    differ: dict[tuple[str, ...], list[int]] = {}  # what differs, and the seeds it does for
    for seed, same in by_seed.items():
        whats = ("split", "cohorts", "init", "shift", "data")
        if unlike := tuple(w for w in whats if len({s["hashes"][w] for s in same if w in s["hashes"]}) > 1):
            differ.setdefault(unlike, []).append(seed)
    for unlike, seeds in differ.items():
        which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        found.append(f"{which}: the methods did not see the same {', '.join(unlike)}; their numbers are not comparable")
    return found
