"""Examples are run as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import personafl

ROOT = Path(__file__).parents[1]


def run_example(name: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    path = ROOT / "examples" / name
    return subprocess.run([sys.executable, path], capture_output=True, text=True, env=env, check=True).stdout


@pytest.mark.slow
def test_a_method_written_outside_the_package_is_compared_with_the_others() -> None:
    out = run_example("new_algorithm.py")
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    table = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    assert table.keys() == {"local", "fedavg-ft", "fedper", "fedbabu"}
    mine = table["fedbabu"]
    assert float(mine["No shift"].split()[0]) > 85
    assert float(mine["MiB"]) < float(table["fedavg-ft"]["MiB"])  # the head does not travel
    assert mine["Evaluated model"] == "the global body under the client's fine-tuned head"
    assert "client 3's outputs:" in out


@pytest.mark.slow
def test_quickstart_gives_every_client_a_better_model_than_the_common_one() -> None:
    out = run_example("quickstart.py")
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    own = {row[0]: float(row[2].split()[0]) for row in rows[2:]}
    assert own.keys() == {"fedavg", "ditto", "fedrep"}
    assert min(own["ditto"], own["fedrep"]) > own["fedavg"] + 10
    said, true = re.findall(r"\[[\d, ]+\]", re.search(r"^client 3: .*$", out, re.M)[0])  # type: ignore[index]
    assert said == true
    folder = Path(re.search(r"^written to (.*)$", out, re.M)[1])  # type: ignore[index]
    assert (folder / "report.html").is_file()
    shutil.rmtree(folder)


def test_ones_own_data_run_from_memory_from_files_and_by_a_saved_split() -> None:
    out = run_example("own_data.py")
    (made,) = re.findall(r"6 clients, 540 samples, hash (\w{16})", out)
    assert f"used again: {{'{made}'}}" in out  # by every method and seed
    assert [re.match(r"\| (\w+)", line)[1] for line in out.splitlines() if line.startswith("| ")] == [
        "Method", "local", "fedavg", "ditto",
    ]  # fmt: skip


def test_the_readmes_combination_of_methods_runs() -> None:
    block = re.search(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block is not None
    recipe = tomllib.loads(block[1]) | {"training": {"num_rounds": 2, "local_epochs": 1}}
    assert recipe["algorithms"][0]["base"]["name"] == "dm-pfl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two rounds being few for DM-PFL
        result = personafl.run(recipe)
    assert [label for label, _ in result.methods] == ["fedpews", "ditto", "fedrep", "dm-pfl"]
    assert result["fedrep"].summary["evaluated_model"] == "the client's inherited private model"
    assert "estimated from the batch" in result["dm-pfl"].summary["evaluated_model"]
