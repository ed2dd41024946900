"""The command line: thin, it calls the rest."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
import time
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from personafl import __version__, config
from personafl.core.algorithm import Algorithm

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
console = Console(width=None if sys.stdout.isatty() else 120)
errors = Console(stderr=True)


def main() -> None:
    """The console script: every wrong input ends in one line and exit code 2."""
    warnings.showwarning = _warn
    sys.path.insert(0, os.getcwd())  # one's own model, data or method in a file beside the recipe
    try:
        code = app(standalone_mode=False)
        if code == 130:  # typer's word for Ctrl-C
            errors.print("stopped; what was written so far is kept")
        sys.exit(code)
    except ValueError as e:
        _fail(str(e))
    except ConnectionError as e:  # another rank is gone
        _fail(str(e), 1)
    except OSError as e:
        _fail(f"{e.filename or 'file'}: {e.strerror or e}")
    except Exception as e:  # typer's own usage errors have a message and an exit code
        if not hasattr(e, "format_message"):
            raise
        _fail(str(e.format_message()))


def _first() -> bool:
    """Whether this is the process that speaks, of those torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"


def _fail(message: str, code: int = 2) -> None:
    if not _first():
        time.sleep(2)  # if the first process failed as well, torchrun ends this one before it says so again
    errors.print(f"personafl: {' '.join(message.split())}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    if _first():
        errors.print(f"note: {message}", markup=False, highlight=False, soft_wrap=True)


# run


@app.command(context_settings={"allow_extra_args": True})
def run(
    recipe: Annotated[str | None, typer.Argument(help="A path or a shipped recipe; none runs the demo.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, section.key=value.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/<recipe>-<time>.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0,1,2; default the recipe's.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    profile: Annotated[bool, typer.Option("--profile", help="Tell where the time went.")] = False,
    store: Annotated[str, typer.Option(help="What clients keep: auto, device, host or disk.")] = "auto",
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="Most memory to use, in GiB.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON and nothing else.")] = False,
) -> None:
    """Run a recipe: every method, one table, one run folder."""
    from personafl import experiment
    from personafl.evaluation import report

    name, changes = _split(recipe, overrides)
    chosen = config.load(name, changes)
    folder = out or Path("runs") / f"{chosen.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if _first():
        experiment.checked(folder)
    numbers = _seeds(seeds)
    with _Watch(chosen, numbers, silent=quiet or as_json or not _first()) as watch:
        where: dict[str, Any] = {"device": device, "store": store, "memory": memory}
        result = experiment.run(chosen, out=folder, seeds=numbers, watch=watch, timed=profile, **where)
    if not _first():
        return
    summaries = [m.summary for m in result.methods.values()]
    if as_json:
        print(json.dumps(summaries))
        return
    _table(summaries)
    for concern in report.concerns(summaries):
        console.print(f"note: {concern}", markup=False)
    if profile:
        _print_times(*result.times())
    console.print(
        f"written to {folder} (table.md, report.html, and per method metrics, clients, summary)", markup=False
    )


def _print_times(columns: list[str], rows: list[list[str]], note: str) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    console.print(note, markup=False, highlight=False)


def _split(recipe: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """A first positional that contains `=` is an override of the demo."""
    rest = list(overrides or [])
    return (None, [recipe, *rest]) if recipe and "=" in recipe else (recipe, rest)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(s) for s in text.split(",") if s.strip()]
    except ValueError:
        raise config.ConfigError(f"--seeds {text}: expected whole numbers, such as 0,1,2") from None
    if len(set(seeds)) < len(seeds) or any(s < 0 for s in seeds):
        raise config.ConfigError(f"--seeds {text}: must differ and not be negative")
    return seeds


class _Watch:
    """Progress: a bar with accuracy and time left on a terminal, a line per evaluation elsewhere."""

    def __init__(self, recipe: config.Recipe, seeds: list[int], *, silent: bool) -> None:
        self.silent = silent
        self.bar: Progress | None = None
        self.runs = len(recipe.algorithms) * max(1, len(seeds))
        self.rounds = recipe.training.num_rounds
        if not silent and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self.bar = Progress(
                *columns,
                TextColumn("{task.fields[accuracy]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self.task = self.bar.add_task("starting", total=self.runs * self.rounds, accuracy="")

    def __enter__(self) -> _Watch:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, label: str, seed: int, stages: int, row: dict[str, Any]) -> None:
        if self.silent:
            return
        accuracy = f"{100 * row['personal']['mean']:.1f} %" if "personal" in row else ""
        if self.bar is not None:
            changes: dict[str, Any] = {"accuracy": accuracy} if accuracy else {}
            ahead = 0 if row["round"] >= self.rounds else 1  # a final stage is no round
            self.bar.update(self.task, advance=ahead, description=f"{label} ({row['phase']})", **changes)
        elif accuracy:
            stage = f"round {row['round'] + 1}/{stages}"
            console.print(
                f"{label} seed {seed} {stage} {row['phase']}: accuracy {accuracy}", markup=False, highlight=False
            )


def _table(summaries: list[dict[str, Any]]) -> None:
    from personafl.evaluation import report

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(report.columns(summaries)[:-1]):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    cells = report.rows(summaries)
    for row in cells:
        table.add_row(*map(escape, row[:-1]))
    console.print(table)
    console.print(report.NOTE, markup=False, highlight=False)
    for remark in report.remarks(summaries):
        console.print(remark, markup=False, highlight=False)
    console.print("Evaluated model:", highlight=False)
    for row in cells:
        console.print(f"  {row[0]}: {row[-1]}", markup=False, highlight=False)


# compare


@app.command()
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or <label>/seed-<n> inside one.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write a page with the table and the curves.")] = None,
    md: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the table as LaTeX.")] = None,
) -> None:
    """Put finished runs side by side."""
    from personafl.evaluation import final, report

    roots = [f.parent.parent if (f / "summary.json").is_file() else f for f in folders]  # the run folders
    names = [r.name for r in dict.fromkeys(roots)]
    found = []
    for folder, root in zip(folders, roots, strict=True):
        prefix = "" if len(names) == 1 else root.name if names.count(root.name) == 1 else root.as_posix()
        found += _finished(folder, prefix)
    summaries = [s for _, s in found]
    keys = [(s["label"], s["seed"]) for s in summaries]
    for key in keys:
        if keys.count(key) > 1:
            raise config.ConfigError(f"compare: {key[0]}, seed {key[1]} is given twice")
    if html:
        curves = {f"{s['label']}, seed {s['seed']}": _lines(home / "metrics.jsonl") for home, s in found}
        evaluations = {
            f"{s['label']}, seed {s['seed']}": final.load(path, ("ids", "client_accuracy"))
            for home, s in found
            if (path := home / "evaluations.npz").is_file()
        }
        html.write_text(report.html(summaries, curves, title="Comparison", evaluations=evaluations))
    if md:
        md.write_text(report.markdown(summaries) + "\n")
    if latex:
        latex.write_text(report.latex(summaries) + "\n")
    _table(summaries)
    for concern in report.concerns(summaries):
        console.print(f"note: {concern}", markup=False)


def _finished(folder: Path, prefix: str) -> list[tuple[Path, dict[str, Any]]]:
    """The summaries under a run folder; where several are compared, labels begin with what tells it from the others."""
    homes = (
        [folder]
        if (folder / "summary.json").is_file()
        else sorted(p.parent for p in folder.glob("*/seed-*/summary.json"))
    )
    if not homes:
        raise config.ConfigError(
            f"{folder}: no finished run here (no summary.json); expected a run folder or <label>/seed-<n>"
        )
    order: list[str] = []
    if (folder / "recipe.toml").is_file():
        order = [m.label for m in config.load(folder / "recipe.toml").algorithms]
    out = []
    for home in homes:
        try:
            summary = json.loads((home / "summary.json").read_text())
            label = summary["label"]
        except (json.JSONDecodeError, KeyError):
            raise config.ConfigError(f"{home / 'summary.json'}: not a summary of a run") from None
        out.append((home, summary | ({"label": f"{prefix}/{label}"} if prefix else {}), label))
    out.sort(key=lambda o: (order.index(o[2]) if o[2] in order else len(order), o[2], o[1]["seed"]))
    return [(home, summary) for home, summary, _ in out]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# list and info


def _first_sentence(thing: object) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


def _algorithms() -> dict[str, str]:
    from personafl.algorithms import ALGORITHMS

    return {name: _first_sentence(cls) for name, cls in ALGORITHMS.items()}


def _datasets() -> dict[str, str]:
    from personafl.data import DATASETS

    return {name: _first_sentence(load) for name, load in DATASETS.items()}


def _partitions() -> dict[str, str]:
    from personafl.data import PARTITIONS

    return {name: rule.summary for name, rule in PARTITIONS.items()}


def _models() -> dict[str, str]:
    from personafl.models import MODELS

    return {name: entry.summary for name, entry in MODELS.items()}


def _recipes() -> dict[str, str]:
    return {name: text.split("\n", 1)[0].lstrip("# ") for name, text in config.recipes().items()}


def _corruptions() -> dict[str, str]:
    from personafl.data.corruptions import CORRUPTIONS

    return {name: _first_sentence(make) for name, make in CORRUPTIONS.items()}


LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "algorithms": _algorithms,
    "datasets": _datasets,
    "partitions": _partitions,
    "corruptions": _corruptions,
    "models": _models,
    "recipes": _recipes,
}


def _of_partition(name: str) -> list[str]:
    from personafl.data.partition import PARTITIONS, REPEATED

    rule = PARTITIONS[name]
    return [
        inspect.getdoc(rule.make) or "",
        f"settings: {', '.join(f'data.{n}' for n in sorted(rule.uses))}",
        *(["may deal a test part by the same rule (data.official_test=dealt)"] if name in REPEATED else []),
    ]


def _of_corruption(name: str) -> list[str]:
    from personafl.data.corruptions import CORRUPTIONS, PARAMETERS

    words = list(inspect.signature(CORRUPTIONS[name]).parameters)[2:]
    steps = [", ".join(f"{w} {v:g}" for w, v in zip(words, values, strict=True)) for values in PARAMETERS[name]]
    return [f"severity {severity}: {step}" for severity, step in enumerate(steps, 1)]


DETAILS: dict[str, Callable[[str], list[str]]] = {
    "partitions": _of_partition,
    "corruptions": _of_corruption,
    "recipes": lambda name: [config.recipes()[name]],
}


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, partitions, corruptions, models or recipes.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Show what there is."""
    if what not in LISTS:
        raise config.ConfigError(f"list {what}: possible are {', '.join(LISTS)}")
    found = LISTS[what]()
    if as_json:
        print(json.dumps([{"name": n, "summary": s} for n, s in found.items()]))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, summary in found.items():
        table.add_row(escape(name), escape(summary))
    console.print(table)


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="An algorithm, data set, partition, corruption, model or recipe.")],
) -> None:
    """Explain one thing by name."""
    from personafl.algorithms import ALGORITHMS

    if name in ALGORITHMS:
        _explain(name, ALGORITHMS[name])
        return
    for kind, found in LISTS.items():
        if name in (entries := found()):
            console.print(f"{kind.rstrip('s')} {name}: {entries[name]}", markup=False)
            for more in DETAILS[kind](name) if kind in DETAILS else []:
                console.print(more, markup=False, highlight=False)
            return
    known = [n for found in LISTS.values() for n in found()]
    raise config.ConfigError(f"info {name}: {config.unknown('name', name, known)}")


def _explain(name: str, cls: Any) -> None:
    module = sys.modules[cls.__module__]
    console.print(f"{name}: {inspect.getdoc(cls)}\n", markup=False)
    console.print(f"{inspect.getdoc(module)}\n", markup=False)
    console.print(f"evaluated: {cls.evaluates}", markup=False)
    console.print(f"a newcomer gets: {cls.newcomers}\n", markup=False)
    table = Table("setting", "default", "meaning", box=None, pad_edge=False)
    for f in cls.settings():
        choices = f.metadata.get("choices")
        meaning = f.metadata.get("help", "") + (f" ({', '.join(choices)})" if choices else "")
        filled = dataclasses.is_dataclass(f.default) and not isinstance(f.default, Algorithm)
        table.add_row(f.name, "a table:" if filled else _shown(f.default), escape(meaning))
        if filled:
            for g in dataclasses.fields(f.default):
                table.add_row(f"  {f.name}.{g.name}", _shown(getattr(f.default, g.name)), g.metadata.get("help", ""))
    console.print(table)


def _shown(default: Any) -> str:
    """A default as a recipe would write it."""
    return config.name_of(default) if isinstance(default, Algorithm) else "none" if default is None else str(default)


# partition and doctor


@app.command()
def partition(
    recipe: Annotated[str | None, typer.Argument(help="A path or a shipped recipe; none is the demo.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw classes and sizes per client.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write who holds which rows: a .json file data.partition can name.")
    ] = None,
    pfllib: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the clients' data as PFLlib has them.")
    ] = None,
) -> None:
    """Show who holds what, without training."""
    from personafl import experiment
    from personafl.data import artefact, own, picture

    name, changes = _split(recipe, overrides)
    chosen = config.load(name, changes)
    if save and save.suffix != ".json":
        raise config.ConfigError(f"--save {save}: must end in .json, so that data.partition can name it")
    fed = experiment.federation(chosen)
    counts = fed.class_counts()
    names = fed.names
    columns = ["client", *(["name"] if names else []), "train", "test", *(f"c{k}" for k in range(counts.shape[1]))]
    table = Table(*columns[: 12 + 3 + bool(names)], box=None, pad_edge=False)
    for c in range(min(fed.everybody, 40)):
        sizes = [str(int(fed.sizes(s)[c])) for s in ("train", "test")]
        table.add_row(
            str(c), *(escape(n) for n in names[c : c + 1]), *sizes, *(str(n) if n else "·" for n in counts[c, :12])
        )
    console.print(table)
    if fed.everybody > 40:
        console.print(f"... and {fed.everybody - 40} more clients")
    notes = "".join(f", {k.replace('_', ' ')}: {v}" for k, v in fed.notes.items())
    console.print(f"{fed.everybody} clients, {int(counts.sum())} samples, hash {fed.digest()}{notes}", markup=False)
    experiment.note_clients(chosen, fed.source)
    if save:
        found = artefact.save(fed, save, tomllib.loads(config.dump(chosen))["data"])
        console.print(f"written to {save}, hash {found}; a recipe uses it by data.partition={save}", markup=False)
    if plot:
        picture.draw(counts, plot, f"{chosen.data.dataset}, {chosen.data.partition}: {fed.everybody} clients")
    if pfllib:
        own.to_pfllib(fed, pfllib, partition=chosen.data.partition, alpha=chosen.data.alpha)
        console.print(f"written to {pfllib}: train/, test/ and config.json, as PFLlib has them", markup=False)


@app.command()
def doctor() -> None:
    """Say what this machine offers, and check that the engine works on it."""
    import numpy
    import torch

    from personafl import experiment
    from personafl.core.types import Evaluation

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    data = os.environ.get("PERSONAFL_DATA", "not set")
    for name, value in (
        ("personafl", __version__),
        ("python", sys.version.split()[0]),
        ("torch", torch.__version__),
        ("numpy", numpy.__version__),
        ("cpu", f"{experiment.cpu()}, {torch.get_num_threads()} threads"),
        ("gpu", gpu),
        ("$PERSONAFL_DATA", data),
    ):
        console.print(f"{name:16} {value}", markup=False, highlight=False)
    recipe = config.load(
        None, ["training.num_rounds=1", "training.local_epochs=1", "training.precision=float64", "algorithms=fedavg"]
    )
    fed = experiment.federation(recipe)
    recipe = dataclasses.replace(recipe, evaluation=Evaluation(shift="none"))
    servers = []
    for chunk in (0, 1):
        sim = experiment.simulation(
            recipe, recipe.algorithms[0], device=experiment.chosen_device("auto"), fed=fed, chunk=chunk
        )
        sim.step()
        servers.append(sim.server)
    gap = max(float((servers[0][n] - servers[1][n]).abs().max()) for n in servers[0])
    console.print(
        f"{'engine':16} one stack against single clients: largest difference {gap:.1e} in float64", highlight=False
    )
    if gap > 1e-9:
        raise config.ConfigError("the stacked engine and single clients disagree on this machine; please report it")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Personalised federated learning: simulate, compare, take every client's model away."""
    if version:
        print(__version__)
        raise typer.Exit


if __name__ == "__main__":
    main()
