"""Published tables and figures run again: what a target must be, how claims are decided, and the command."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import personafl
from personafl.core.errors import UserError
from personafl.core.table import Table
from personafl.evaluation.settings import Evaluation
from personafl.experiment import measures, pages, reproduction, targets
from personafl.experiment.comparison import Comparison, Item, Verdict, interval
from personafl.experiment.pages import Page, reproduced
from personafl.experiment.reproduction import Reproduction
from personafl.experiment.shared_runs import SharedRun, merged, plan
from personafl.experiment.targets import Claim, Setting, Target

QUICK: dict[str, Any] = {"device": "cpu", "smoke": True}
SHARED = Path(__file__).parents[3] / "shared"  # beside the checkout, where it is


def told(own: float, shifted: float, **more: Any) -> dict[str, Any]:
    """A summary with accuracies without shift and at full shift."""
    cells = {"0.0": {"mean": own, "std": 0.1}, "1.0": {"mean": shifted, "std": 0.2}}
    return {"shift": {"degrees": cells}, "accuracy": {}} | more


def target(claims: Sequence[Claim] = (), **changes: Any) -> Target:
    made: dict[str, Any] = {
        "name": "t", "title": "T", "paper": "dm-pfl", "seeds": (0, 1, 2), "published": ("table 1",),
        "columns": ("w/o shift", "100% shift"), "settings": (Setting("CIFAR-10, Dir(0.3)"),),
        "methods": {"fedavg-ft": "FedAvg+FT", "ditto": "Ditto", "dm-pfl": "DM-PFL"},
        "claims": tuple(claims), "recipe": {"algorithms": ["fedavg-ft", "ditto", "dm-pfl"]},
    }  # fmt: skip
    return Target(**(made | changes))


def compared(claims: Sequence[Claim], **by_label: Sequence[tuple[float, float]]) -> Comparison:
    found = {
        ("CIFAR-10, Dir(0.3)", label.replace("_", "-")): [told(*pair) for pair in seeds]
        for label, seeds in by_label.items()
    }
    return Comparison(target(claims), found)


def test_an_override_may_be_of_a_single_method_and_two_labels_may_share_a_published_name() -> None:
    made = target(
        methods={"fedavg-ft": "FedAvg+FT", "dm-pfl": "DM-PFL", "searched": "DM-PFL"},
        recipe={"algorithms": ["fedavg-ft", "dm-pfl", {"name": "dm-pfl", "label": "searched", "iterations": 1}]},
        by_method={"searched": ("training.lr=0.05",)},
    )
    assert [made.changes(made.settings[0].name, label) for label in made.methods] == [{}, {}, {"training.lr": "0.05"}]
    rates = [made.recipe_of(made.settings[0], label).training.lr for label in made.methods]
    usual = made.recipe_of(Setting("any"), "fedavg-ft").training.lr
    assert usual != 0.05 and rates == [usual, usual, 0.05]
    printed = made.printed()
    key = made.settings[0].name, "100% shift"
    assert printed[key[0], "searched", key[1]] == printed[key[0], "dm-pfl", key[1]]
    assert [made.shown(label) for label in made.methods] == ["FedAvg+FT", "DM-PFL (dm-pfl)", "DM-PFL (searched)"]


@pytest.mark.parametrize("name", targets.names())
def test_a_target_names_what_there_is(name: str) -> None:
    found = targets.load(name)
    printed = found.printed()
    rows, settings = {*found.methods, *found.best}, {s.name for s in found.settings}
    assert {r for _, r, _ in printed} <= rows
    if not name.startswith("frontier"):  # what no paper has
        assert {s for s, _, _ in printed} == settings
        assert {r for _, r, _ in printed} == rows or found.best
        others = ("dmpfl-fig4", "dmpfl-fig6")
        assert {c for _, _, c in printed} >= set(found.columns) - {"global model"} or name in others
    for setting in found.settings:
        for label in found.methods:
            recipe = found.recipe_of(setting, label)
            assert recipe.training.num_rounds == 300 and [m.label for m in recipe.algorithms] == [label]
    for claim in found.claims:
        assert {claim.column, *claim.columns} <= {*found.columns, ""} and (claim.column or claim.columns)
        assert {claim.than_column} <= {*found.columns, ""} and {*claim.settings, claim.against} <= {*settings, ""}
        assert {*claim.ours, *claim.than} <= rows


@pytest.mark.skipif(not (SHARED / "published.json").is_file(), reason="needs the papers' numbers")
def test_the_numbers_are_those_of_the_paper() -> None:
    """Every cell of its seven tables, one by one."""
    papers = json.loads((SHARED / "published.json").read_text())["records"]
    own = {"CIFAR10": "CIFAR-10"}
    there = {
        (f"table {r['table']}", own.get(r["dataset"], r["dataset"]), r["partition"], r["method"], r["column"]): r
        for r in papers
        if r["paper"] == "DM-PFL"
    }
    with (Path(targets.__file__).parents[1] / targets.FOLDER / "dm-pfl.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["source"].startswith("table")]
    assert len(rows) == len(there) == 408
    for r in rows:
        dataset, _, partition = r["setting"].partition(", ")
        keys = [(r["source"], dataset, p, r["method"], r["column"]) for p in (partition or None, "realistic")]
        true = next(there[k] for k in keys if k in there)
        assert float(r["value"]) == true["mean"] and r["unit"] == true["metric"]
        assert (float(r["std"]) if r["std"] else None) == true["std"]


def test_an_interval_is_students() -> None:
    assert interval([1.0]) is None
    assert interval([1.0, 3.0]) == pytest.approx(12.706 * 2**0.5 / 2**0.5, rel=1e-4)  # t(1) = 12.706, s = sqrt(2)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / 3**0.5, rel=1e-4)


AHEAD = Claim("ahead", "100% shift", ("dm-pfl",), ("fedavg-ft", "ditto"))


@pytest.mark.parametrize(
    ("ours", "status"),
    [
        ((0.60, 0.61, 0.62), "holds"),  # 10, 10, 10 points ahead of the best
        ((0.40, 0.41, 0.42), "does not hold"),
        ((0.60, 0.41, 0.52), "undecided"),  # 10, -10, 0
    ],
)
def test_a_claim_is_decided_by_the_interval_over_seeds(ours: tuple[float, ...], status: str) -> None:
    """Against the best of the others by their mean: Ditto, with 50, 51 and 52 %."""
    found = compared(
        [AHEAD],
        fedavg_ft=[(0.9, 0.3)] * 3,
        ditto=[(0.8, 0.5), (0.8, 0.51), (0.8, 0.52)],
        dm_pfl=[(0.8, o) for o in ours],
    )
    (verdict,) = found.verdicts()
    (item,) = verdict.items
    assert (verdict.status, item.other) == (status, "ditto")
    assert item.ahead == pytest.approx([100 * (o - d) for o, d in zip(ours, (0.5, 0.51, 0.52), strict=True)])
    assert item.printed == pytest.approx(56.79 - 49.04)  # Table 1: DM-PFL, Ditto


def test_a_rehearsal_judges_nothing() -> None:
    seeds = {"fedavg_ft": [(0.8, 0.5)], "ditto": [(0.7, 0.2)], "dm_pfl": [(0.8, 0.6)]}
    gone = Claim("gone", "w/o shift", ("dm-pfl",), ("apfl",))
    found = compared([AHEAD, gone], **seeds)
    assert [v.status for v in found.verdicts()] == ["holds", "not run"]
    assert [v.status for v in replace(found, rehearsal=True).verdicts()] == ["not judged", "not run"]


def test_other_kinds_of_claims() -> None:
    seeds = {"fedavg_ft": [(0.800, 0.5)] * 3, "ditto": [(0.7, 0.2)] * 3, "dm_pfl": [(0.795, 0.6)] * 3}
    level = Claim("level", "w/o shift", ("dm-pfl",), ("fedavg-ft",), margin=-1.0)
    behind = Claim("ahead", "w/o shift", ("dm-pfl",), ("fedavg-ft",))
    near = Claim("near", "w/o shift", ("dm-pfl",), near=79.0, within=0.6)
    far = Claim("far", "w/o shift", ("dm-pfl",), near=79.0, within=0.4)
    columns = Claim("columns", "w/o shift", ("dm-pfl",), than_column="100% shift", margin=15.0)
    gone = Claim("gone", "w/o shift", ("dm-pfl",), ("apfl",))
    found = compared([level, behind, near, far, columns, gone], **seeds)
    statuses = [v.status for v in found.verdicts()]
    assert statuses == ["holds", "does not hold", "holds", "does not hold", "holds", "not run"]


@pytest.mark.parametrize(
    ("bound", "statuses"),
    [
        ({"least": 77.7}, ["holds", "does not hold"]),  # 79 ± 1.24 and 50
        ({"least": 78.0}, ["undecided", "does not hold"]),
        ({"least": 80.5}, ["does not hold", "does not hold"]),
        ({"most": 80.3}, ["holds", "holds"]),
        ({"most": 78.5}, ["undecided", "holds"]),
        ({"most": 77.5}, ["does not hold", "holds"]),
        ({"most": 50.0}, ["does not hold", "holds"]),  # what is the number itself keeps to it
    ],
)
def test_a_claim_may_be_held_to_a_number(bound: dict[str, float], statuses: list[str]) -> None:
    """By the interval over seeds, 78.5, 79 and 79.5; where models diverged nothing is kept."""
    seeds = {"dm_pfl": [(0.785, 0.5), (0.79, 0.5), (0.795, 0.5)]}
    claims = [Claim("own", "w/o shift", ("dm-pfl",), **bound), Claim("shift", "100% shift", ("dm-pfl",), **bound)]
    found = compared([*claims, Claim("gone", "w/o shift", ("ditto",), **bound)], **seeds)
    assert [v.status for v in found.verdicts()] == [*statuses, "not run"]
    (item,) = found.verdicts()[0].items
    number = next(iter(bound.values()))
    assert item.mean == pytest.approx(79.0 - number) and item.printed == pytest.approx(79.93 - number)
    where = dict.fromkeys(("hardware", "precision", "torch", "version"), "x")
    for seed, one in enumerate(found.summaries["CIFAR-10, Dir(0.3)", "dm-pfl"]):
        one |= {"time": {"seconds": 1}, "environment": where, "rounds": 1, "settings": {}, "seed": seed}  # type: ignore[operator]
        one["hashes"] = {"split": "s", "init": "i"}  # type: ignore[index]
    assert f"from {number:g} (published" in reproduced(found, (0, 1, 2)).markdown()
    found.summaries["CIFAR-10, Dir(0.3)", "dm-pfl"][1]["diverged"] = {"final": 1}  # type: ignore[index]
    after = ["undecided" if s == "holds" else s for s in statuses]
    assert [v.status for v in found.verdicts()] == [*after, "not run"]


@pytest.mark.parametrize("many", [pages.MANY, pages.MANY + 1])
def test_of_many_comparisons_the_two_furthest_apart_are_told(many: int) -> None:
    items = tuple(Item(f"column {i}", "dm-pfl", "ditto", (i - 3.0,), None, "undecided") for i in range(many))
    told = pages._told(Verdict(AHEAD, items))
    if many == pages.MANY:
        assert len(told) == many
    else:
        assert told == [
            "13 comparisons, from column 0: dm-pfl -3.00 against ditto",
            "to column 12: dm-pfl +9.00 against ditto",
        ]
    gone = pages._told(Verdict(AHEAD, (*items, Item("column", "dm-pfl", "", (), None, "not run"))))
    assert len(gone) == many + 1 and gone[-1] == "column: dm-pfl, or what it is compared with, not run"


def test_means_over_corruptions_and_other_numbers_of_inputs_are_columns() -> None:
    cell = {"mean": 0.6, "std": 0.1}
    kinds = {"snow": {"3": {"mean": 0.5, "std": 0.2}}, "fog": {"3": {"mean": 0.7, "std": 0.1}, "4": cell}}
    by_count = {"8": {"0.0": {"mean": 0.9}, "1.0": {"mean": 0.4}}}
    change = {"levels": {"own": 0.8, "shifted": 0.7, "own_again": 0.75}, "recovery": {"shifted": 12, "own_again": 3}}
    one = told(0.5, 0.25) | {
        "robustness": {"corruptions": kinds, "whole_corruptions": kinds, "inputs": by_count, "change": change}
    }
    columns = {
        "own all corruptions 3": 60.0, "all corruptions 3": 60.0, "own all corruptions 5": None,
        "w/o shift, 8 inputs": 90.0, "100% shift, 8 inputs": 40.0, "average, 8 inputs": 65.0, "average, 1 input": None,
        "level, own again": 75.0, "inputs to recover, shifted": 12.0,
    }  # fmt: skip
    assert {c: measures.measure(c, one) for c in columns} == pytest.approx(columns)
    assert measures.spread("own all corruptions 3", one) == pytest.approx(15.0)
    assert measures.spread("w/o shift, 8 inputs", one) is None and measures.spread("level, own", one) is None
    assert measures.measure("level, own", told(0.5, 0.25)) is None


def test_a_picture_may_be_the_frontier() -> None:
    """Of the methods that have both numbers, and the published ones beside them."""
    seeds = {"dm_pfl": [(0.8, 0.5)], "fedavg_ft": [(0.7, 0.6)]}
    found = compared([], **seeds)
    found = Comparison(replace(found.target, picture="frontier"), found.summaries)
    for one in [told for of in found.summaries.values() for told in of]:
        one["communication"] = {"paper_mib_per_client": 1.0}  # type: ignore[index]
    drawn = pages._picture(found)
    assert drawn is not None
    assert {t.get_text() for t in drawn.axes[0].texts} == {"DM-PFL", "FedAvg+FT"}
    assert len(drawn.axes[0].collections) == 4  # two discs, two crosses


def test_a_target_of_our_own_has_measured_numbers_alone(tmp_path: Path) -> None:
    found = personafl.reproduce("frontier-uniform", out=tmp_path / "r", only=["dense", "fedavg-augmented"], **QUICK)
    page = (tmp_path / "r" / "page.md").read_text()
    cell = found.comparison.cell("CIFAR-10, Dir(0.3)", "dense", "w/o shift")
    assert "Measured: seed 0." in page and "Published" not in page and "– /" not in page
    assert f"| Dense | {cell.mean:.2f} |" in page


def test_no_cell_of_the_table_of_numbers_is_a_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of settings and labels are a target's own; a negative number stays one."""
    monkeypatch.setattr(Reproduction, "page", Page("T", []))
    setting, label = '=HYPERLINK("http://x")', "+ditto"
    methods = [{"name": "ditto", "label": label}]
    asked = target(settings=(Setting(setting),), methods={label: "Ditto"}, published=(), recipe={"algorithms": methods})
    Reproduction(asked, (0,), {(setting, label): [told(-0.25, 0.5)]}, tmp_path / "r").write()
    head, first, _ = csv.reader((tmp_path / "r" / "comparison.csv").read_text().splitlines())
    row = dict(zip(head, first, strict=True))
    assert (row["setting"], row["method"], row["measured"]) == (f"'{setting}", f"'{label}", "-25.0")


def test_a_picture_may_be_of_streams_that_change() -> None:
    seeds = {"dm_pfl": [(0.8, 0.5), (0.8, 0.5)], "ditto": [(0.7, 0.6), (0.7, 0.6)]}
    found = compared([], **seeds)
    found = Comparison(replace(found.target, picture="change"), found.summaries)
    for seed, one in enumerate(found.summaries["CIFAR-10, Dir(0.3)", "dm-pfl"]):
        one["robustness"] = {"change": {"curve": [0.5 + 0.2 * seed] * 30}}  # type: ignore[index]
    drawn = pages._picture(found)
    assert drawn is not None
    (line,) = drawn.axes[0].lines  # Ditto has none
    assert line.get_label() == "DM-PFL" and line.get_ydata() == pytest.approx(60.0)


def test_best_of_several_is_chosen_column_by_column() -> None:
    found = compared([], fedavg_ft=[(0.9, 0.3)], ditto=[(0.8, 0.5)], dm_pfl=[(0.1, 0.1)])
    best = target([Claim("best", "w/o shift", ("dm-pfl",), ("Best",))], best={"Best": ("fedavg-ft", "ditto")})
    found = Comparison(best, found.summaries)
    (item,) = found.verdicts()[0].items
    assert (item.status, item.other) == ("does not hold", "fedavg-ft")  # who it was is told
    setting = found.target.settings[0]
    assert found.rows(setting) == ["fedavg-ft", "ditto", "dm-pfl", "Best"]
    assert [found.cell(setting.name, "Best", c).mean for c in ("w/o shift", "100% shift")] == [90.0, 50.0]


def test_the_best_is_not_known_before_all_have_run() -> None:
    claims = [Claim("best", "w/o shift", ("dm-pfl",), ("Best",))]
    some = compared([], ditto=[(0.1, 0.1)], dm_pfl=[(0.9, 0.9)])
    found = Comparison(target(claims, best={"Best": ("fedavg-ft", "ditto")}), some.summaries)
    assert found.verdicts()[0].status == "not run"
    assert not found.cell("CIFAR-10, Dir(0.3)", "Best", "w/o shift").values


def test_who_is_ahead_of_all_is_so_of_each() -> None:
    """Fine-tuning's mean is below Ditto's, but whether it is below ours three seeds do not tell."""
    ours, ditto, tuned = (0.5, 0.5, 0.5), (0.40, 0.41, 0.40), (0.52, 0.20, 0.40)
    claim = Claim("all", "100% shift", ("dm-pfl",), ("ditto", "fedavg-ft"))
    found = compared(
        [claim], **{n: [(0.5, v) for v in of] for n, of in (("dm_pfl", ours), ("ditto", ditto), ("fedavg_ft", tuned))}
    )
    assert found.verdicts()[0].status == "undecided"
    assert found.verdicts()[0].items[0].other == "fedavg-ft"  # Ditto is nearer, and surely behind


def test_a_run_that_diverged_decides_nothing() -> None:
    found = compared([AHEAD], fedavg_ft=[(0.9, 0.3)] * 3, ditto=[(0.8, 0.1)] * 3, dm_pfl=[(0.8, 0.5)] * 3)
    assert found.verdicts()[0].status == "holds"
    found.summaries["CIFAR-10, Dir(0.3)", "ditto"][1]["diverged"] = {"final": 1}  # type: ignore[index]
    assert found.verdicts()[0].status == "undecided"


def test_columns_are_measured() -> None:
    one = told(0.5, 0.25) | {
        "communication": {"paper_mib_per_client": 40.0},
        "compute": {"flops_per_client": 3e12, "dense_flops_per_client": 6e12},
        "accuracy": {"global": {"mean": 0.6}},
        "robustness": {
            "corruptions": {"gaussian_noise": {"3": {"mean": 0.4, "std": 0.1}}},
            "whole_corruptions": {"gaussian_noise": {"3": {"mean": 0.3, "std": 0.05}}},
        },
        "masks": {
            "pairs": [[1, 0.9, 0.5], [0.9, 1, 0.7], [0.5, 0.7, 1]],
            "by_client": {"convs.0.weight": [9, 9, 9], "fcs.0.weight": [10, 20, 30], "head.weight": [1, 2, 3]},
        },
    }
    base = {"communication": {"paper_mib_per_client": 100.0}, "compute": {"flops_per_client": 4e12}}
    expected = {
        "w/o shift": 50.0, "100% shift": 25.0, "average": 37.5, "communication": 40.0, "computation": 3.0,
        "communication relative to FedAvg": 40.0, "computation relative to FedAvg": 75.0,
        "computation relative to dense": 50.0, "global model": 60.0, "gaussian noise 3": 30.0,
        "own gaussian noise 3": 40.0, "similarity within groups": 0.9, "similarity across groups": 0.6,
        "shared weights, client 1": 22.0, "shared weights, clients 1 to 2": 27.5,
    }  # fmt: skip
    assert {c: measures.measure(c, one, base, (2, 1)) for c in expected} == pytest.approx(expected)
    assert measures.spread("100% shift", one) == pytest.approx(20.0)
    assert measures.measure("40% shift", one) is None
    with pytest.raises(UserError, match="nothing is known to measure it by"):
        measures.measure("loudness", one)


def test_the_matrix_of_models_and_test_sets_gives_the_means_where_there_is_one() -> None:
    drawn = told(0.5, 0.25) | {"robustness": {"expected": {"0.0": {"mean": 0.5}, "1.0": {"mean": 0.3}}}}
    assert measures.measure("100% shift", drawn) == pytest.approx(30.0)
    assert measures.measure("average", drawn) == pytest.approx(40.0)


def test_a_page_says_its_words_as_they_are() -> None:
    page = Page("A < B", ["## Head", "some `code` & **more**", Table(["a|b"], [["x|y <i>"]], marked=True)])
    assert page.markdown() == "# A < B\n\n## Head\n\nsome `code` & **more**\n\n| a\\|b |\n| --- |\n| x\\|y <i> |\n"
    html = page.html()
    assert "<h1>A &lt; B</h1>" in html and "<code>code</code> &amp; <b>more</b>" in html and "x|y &lt;i&gt;" in html


def test_a_target_is_run_compared_and_gone_on_with(tmp_path: Path) -> None:
    seen: list[str] = []

    def heard(run: SharedRun, place: int, of: int) -> None:
        seen.append(f"{run.setting} {run.label} {run.seed} {place}/{of}")

    out = tmp_path / "o"
    first = personafl.reproduce("dmpfl-table1", only=["fedavg"], out=out, told=heard, **QUICK)
    assert list(first.summaries) == [("CIFAR-10, Dir(0.3)", "fedavg")]
    path = out / "runs" / "cifar-10-dir-0.3" / "fedavg-0" / "fedavg" / "seed-0" / "summary.json"
    stamp = path.stat().st_mtime_ns
    again = personafl.reproduce("dmpfl-table1", only=["fedavg", "ditto"], out=out, told=heard, **QUICK)
    assert path.stat().st_mtime_ns == stamp and [label for _, label in again.summaries] == ["fedavg", "ditto"]
    places = ["fedavg 0 1/1", "fedavg 0 1/2", "ditto 0 2/2"]
    assert seen == [f"CIFAR-10, Dir(0.3) {place}" for place in places]
    summary = json.loads(path.read_text())
    row = next(r for r in again.rows() if r["method"] == "fedavg" and r["column"] == "100% shift")
    assert row["published"] == 58.56
    assert row["measured"] == pytest.approx(100 * summary["robustness"]["expected"]["1.0"]["mean"])
    page = (out / "page.md").read_text()
    assert "A rehearsal" in page and "personafl reproduce dmpfl-table1 --smoke" in page and "not judged" not in page
    assert {f.name for f in out.iterdir()} >= {"page.html", "comparison.csv", "figure.png", "reproduction.json"}
    with pytest.raises(UserError, match="of other targets, of other seeds"):
        personafl.reproduce("dmpfl-table1", seeds=[5], out=out, **QUICK)
    path.write_text("{")
    with pytest.raises(UserError, match=r"summary.json: cannot be read; remove .*fedavg-0 to run it anew"):
        personafl.reproduce("dmpfl-table1", only=["fedavg"], out=out, **QUICK)


def test_targets_share_what_they_have_in_common() -> None:
    """Table 4 has one seed of Table 1's methods, Figure 4 their corrupted images, Figure 5 DM-PFL as it is there."""
    names = ["dmpfl-table1", "dmpfl-table4", "dmpfl-fig4", "dmpfl-fig5"]
    asked = [targets.load(n) for n in names]
    runs = plan([(t, t.seeds) for t in asked])
    assert len(runs) == 14 * 3 + 10 * 3  # of Figure 5's twelve points two are Table 1's
    (dm_pfl,) = (r for r in runs if ("dmpfl-table1", "CIFAR-10, Dir(0.3)", "dm-pfl") in r.places and r.seed == 0)
    assert [place[0] for place in dm_pfl.places] == [*names, "dmpfl-fig5"]
    assert dm_pfl.home == Path("runs/cifar-10-dir-0.3/dm-pfl-0")
    judged = dm_pfl.recipe.evaluation
    assert judged.matrix and judged.corrupted == "both" and len(judged.corruptions) == 12 and judged.shift == "donor"
    (fedavg,) = (r for r in runs if r.label == "fedavg" and r.seed == 1)
    assert [place[0] for place in fedavg.places] == ["dmpfl-table1"] and not fedavg.recipe.evaluation.corruptions
    assert len({r.home for r in runs}) == len(runs)


def test_one_run_is_judged_by_all_that_is_asked_of_it() -> None:
    a = Evaluation(degrees=(0.0, 1.0), matrix=True)
    b = Evaluation(degrees=(0.0, 0.5), corruptions=("fog",), severities=(1, 3), corrupted="whole")
    c = Evaluation(degrees=(0.0,), shift="none", corruptions=("snow",), severities=(3, 5), corrupted="own")
    ab = merged(a, b)
    assert ab == merged(b, a) == replace(b, degrees=(0.0, 0.5, 1.0), matrix=True)
    assert ab is not None and merged(ab, c) == replace(
        ab, corruptions=("fog", "snow"), severities=(1, 3, 5), corrupted="both"
    )
    assert merged(a, replace(a, shift="pool")) is None  # one run has one kind of shift
    assert merged(a, replace(a, draws=3)) is None  # and draws donors once
    assert merged(b, replace(b, corruptions=("all",))) is None
    assert merged(a, a) == a
    assert merged(a, replace(a, change=8)) == merged(replace(a, change=8), a) == replace(a, change=8)
    assert merged(replace(a, change=4), replace(a, change=8)) is None  # one stream has one length
    counted = merged(replace(a, input_counts=(1, 8)), replace(a, input_counts=(8, 32)))
    assert counted == replace(a, input_counts=(1, 8, 32))


def test_other_trainings_are_other_runs() -> None:
    """Whatever part of the recipe differs, and however alike settings are called."""
    base = {"algorithms": ["ditto"], "training": {"num_rounds": 4}}
    changes: list[dict[str, Any]] = [
        {"model": {"name": "mlp"}}, {"data": {"alpha": 0.7}}, {"training": {"num_rounds": 5}},
        {"faults": {"drop_rate": 0.5}}, {"algorithms": [{"name": "ditto", "proximal_weight": 0.3}]},
    ]  # fmt: skip
    made = [target(name=f"t{i}", methods={"ditto": "Ditto"}, recipe=base | c) for i, c in enumerate([{}, *changes])]
    runs = plan([(t, [0]) for t in made])
    assert len(runs) == len({r.home for r in runs}) == 6
    other = target(
        name="t", methods={"mine": "Ditto"}, recipe=base | {"algorithms": [{"name": "ditto", "label": "mine"}]}
    )
    (one,) = plan([(made[0], [0]), (other, [0])])
    assert one.labels == {"ditto", "mine"} and one.label == "ditto"


def test_the_overrides_of_a_method_in_a_setting_come_last() -> None:
    setting = Setting("s", ("training.lr=0.2",), {"ditto": ("training.lr=0.3",)})
    made = target(settings=(setting,), by_method={"ditto": ("training.lr=0.1",), "dm-pfl": ("training.lr=0.1",)})
    assert [made.recipe_of(setting, label).training.lr for label in made.methods] == [0.2, 0.3, 0.2]
    assert targets.expanded(["dmpfl-table1", "dmpfl", "dmpfl-table1"])[0] == "dmpfl-table1"
    both = targets.expanded(["dmpfl-table1", "dmpfl", "frontier"])
    assert sorted(both) == targets.names() and len(targets.expanded(["frontier"])) >= 2


def test_numbers_are_those_of_each_seed() -> None:
    """Relative to FedAvg of the same seed; near by the mean; behind by more than a margin; diverged is undecided."""
    methods = {"fedavg": "FedAvg", "ditto": "Ditto", "dm-pfl": "DM-PFL"}
    made = target(columns=("communication relative to FedAvg",), methods=methods, recipe={"algorithms": list(methods)})
    seeds = {
        "fedavg": [{"communication": {"paper_mib_per_client": m}} for m in (10.0, 20.0)],
        "ditto": [{"communication": {"paper_mib_per_client": m}} for m in (5.0, 5.0)],
    }
    name = made.settings[0].name
    found = Comparison(made, {(name, label): [told(0.5, 0.5) | s for s in of] for label, of in seeds.items()})
    assert found.cell(name, "ditto", "communication relative to FedAvg").values == (50.0, 25.0)
    near = Claim("near", "w/o shift", ("dm-pfl",), near=80.0, within=1.0)
    behind = Claim("behind", "w/o shift", ("dm-pfl",), ("ditto",), margin=-3.0)
    by = {"dm_pfl": [(0.8, 0.5), (0.9, 0.5), (0.9, 0.5)], "ditto": [(0.801, 0.5), (0.901, 0.5), (0.901, 0.5)]}
    far = compared([near, behind], **by)
    assert [v.status for v in far.verdicts()] == ["does not hold", "holds"]
    far.summaries["CIFAR-10, Dir(0.3)", "dm-pfl"][2]["diverged"] = {"final": 1}  # type: ignore[index]
    assert far.verdicts()[1].status == "undecided"


def test_the_expectation_over_donors_is_for_the_table_that_asks_for_it() -> None:
    drawn = told(0.5, 0.25) | {"robustness": {"expected": {"0.0": {"mean": 0.5}, "1.0": {"mean": 0.3}}}}
    assert measures.measure("100% shift", drawn, expected=False) == pytest.approx(25.0)
    assert measures.measure("average", drawn, degrees=(0.0, 0.5)) is None
    recipe = {"algorithms": ["ditto"], "evaluation": {"degrees": [0.0, 1.0]}}
    plain = target(methods={"ditto": "Ditto"}, recipe=recipe)
    found = Comparison(plain, {(plain.settings[0].name, "ditto"): [drawn]})
    assert found.cell(plain.settings[0].name, "ditto", "100% shift").mean == pytest.approx(25.0)


def test_an_average_is_over_the_degrees_of_its_own_table() -> None:
    """0 and 100 % here, though the run has 50 % for another table."""
    cells = {d: {"mean": m, "std": 0.0} for d, m in (("0.0", 0.8), ("0.5", 0.7), ("1.0", 0.4))}
    made = target(columns=("average",), recipe={"algorithms": ["ditto"], "evaluation": {"degrees": [0.0, 1.0]}},
                  methods={"ditto": "Ditto"})  # fmt: skip
    summary = {"shift": {"degrees": cells}, "accuracy": {}}
    found = Comparison(made, {("CIFAR-10, Dir(0.3)", "ditto"): [summary]})
    assert found.cell("CIFAR-10, Dir(0.3)", "ditto", "average").mean == pytest.approx(60.0)
    assert measures.measure("average", summary) == pytest.approx(100 * 1.9 / 3)


def test_a_run_that_was_cut_off_is_gone_on_with(tmp_path: Path) -> None:
    """In the middle, or before it had said what it is; one that somebody went on with is not of the table."""
    out = tmp_path / "o"
    asked: dict[str, Any] = {"only": ["fedavg"], "out": out, **QUICK}
    whole = personafl.reproduce("dmpfl-table4", **asked)
    home = out / "runs" / "cifar-10" / "fedavg-0"
    path = home / "fedavg" / "seed-0" / "summary.json"
    first = {k: v for k, v in json.loads(path.read_text()).items() if k != "time"}
    (home / "run.json").unlink()
    again = personafl.reproduce("dmpfl-table4", **asked)
    assert {k: v for k, v in json.loads(path.read_text()).items() if k != "time"} == first
    path.unlink()
    (path.parent / "checkpoint" / "manifest.json").unlink()
    personafl.reproduce("dmpfl-table4", **asked)
    assert {k: v for k, v in json.loads(path.read_text()).items() if k != "time"} == first
    assert list(again.summaries) == list(whole.summaries)
    shutil.rmtree(home)
    personafl.reproduce("dmpfl-table4", **asked)
    personafl.resume(home, "training.num_rounds=6", quiet=True)
    with pytest.raises(UserError, match=r"is not of seed 0 and 4 rounds; remove .* to run it anew"):
        personafl.reproduce("dmpfl-table4", **asked)


def test_several_targets_are_run_in_one_folder(tmp_path: Path) -> None:
    names = ["dmpfl-table4", "dmpfl-table2"]
    found = personafl.reproduce_all(names, only=["ditto"], out=tmp_path / "o", **QUICK)
    assert [f.target.name for f in found] == names and all(f.summaries for f in found)
    for name in names:
        assert (tmp_path / "o" / name / "page.md").is_file()
    request = json.loads((tmp_path / "o" / "reproduction.json").read_text())
    (ditto,) = (r for r in request["runs"] if ["dmpfl-table4", "CIFAR-10", "ditto"] in r["for"])
    assert (tmp_path / "o" / ditto["home"] / "ditto" / "seed-0" / "summary.json").is_file()


def test_a_setting_may_have_overrides_of_single_methods() -> None:
    found = targets.load("dmpfl-table3")
    rates = {
        (s.name, label): found.recipe_of(s, label).training.lr
        for s in found.settings
        for label in ("lg-fedavg", "ditto")
    }
    assert rates == {
        ("HAR", "lg-fedavg"): 0.05, ("HAR", "ditto"): 0.1, ("FEMNIST", "lg-fedavg"): 0.1, ("FEMNIST", "ditto"): 0.1,
    }  # fmt: skip


def test_what_is_asked_for_wrongly_is_said() -> None:
    with pytest.raises(UserError, match="dmpfl: are 10 targets; reproduce_all takes several"):
        personafl.reproduce("dmpfl", smoke=True, only=["fedavgg"])
    with pytest.raises(UserError, match="no such target; did you mean dmpfl-table1"):
        personafl.reproduce("dmpfl-tabel1")
    with pytest.raises(UserError, match="only fedavgg"):
        personafl.reproduce("dmpfl-table1", only=["fedavgg"])
    for names in ([], ["dmpfl-tabel1"], [5], 5, None):
        with pytest.raises(UserError, match=r"needs a target|no such target|is no name"):
            personafl.reproduce_all(names, jobs=2)  # type: ignore[arg-type]
    for only in (5, [5], None):
        with pytest.raises(UserError, match=r"only: .* is no name"):
            personafl.reproduce("dmpfl-table1", only=only)
    with pytest.raises(UserError, match="quiet: reproduce takes no such argument"):
        personafl.reproduce("dmpfl-table1", quiet=True)
    with pytest.raises(UserError, match="jobs 0"):
        personafl.reproduce("dmpfl-table1", jobs=0)
    with pytest.raises(UserError, match=r"seeds=\[1, 1\]"):
        personafl.reproduce("dmpfl-table1", seeds=[1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", targets.names())
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:allocation=")
def test_every_target_has_a_rehearsal(name: str, tmp_path: Path) -> None:
    """All its methods and settings, on the digits; every number it compares is there."""
    found = reproduction.reproduce(name, jobs=2, out=tmp_path / "o", **QUICK)
    assert len(found.summaries) == len(found.target.settings) * len(found.target.methods)
    for setting, row, column, cell in found.comparison.cells():
        assert cell.values, (setting, row, column)
    assert all(v.status != "not run" for v in found.comparison.verdicts())
