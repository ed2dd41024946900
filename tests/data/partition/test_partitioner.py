"""What all partitions refuse, and settings as they are declared."""

import tomllib
from typing import Annotated, get_origin

import numpy as np
import pytest

from personafl import config, experiment
from personafl.core.errors import UserError
from personafl.data.partition import PARTITIONS, PartitionResult, Setting, partition
from personafl.data.partition.partitioner import partitioner
from tests.data.partition.common import balanced, request


@pytest.mark.parametrize(
    ("samples", "clients", "least"),
    [(4000, 20, 40), (800, 20, 20), (30, 10, 2), (20, 10, 2)],  # min(40, half the average), never below 2
)
def test_the_least_a_client_may_have(samples, clients, least):
    assert request(np.zeros(samples, int), clients).least == least


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_too_many_clients_are_refused(name):
    with pytest.raises(ValueError, match="num_clients=6: the data set has 10 samples"):
        partition(name, request(np.zeros(10, int), 6, clients=np.arange(10), sources=np.arange(10)))


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural", "by-source"}))
def test_partitions_that_do_not_know_their_clients_need_a_number(name):
    with pytest.raises(ValueError, match="num_clients=0: must be at least 1"):
        partition(name, request(balanced(10), 0))


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_every_setting_is_documented_and_its_default_is_one_that_it_allows(name):
    assert PARTITIONS[name].summary.endswith(".")
    for setting in PARTITIONS[name].settings.values():
        assert setting.help and setting.type in (int, float, bool, tuple[int, ...])
        assert type(setting.default) is (get_origin(setting.type) or setting.type)
        setting.check(setting.default)


def test_settings_a_partition_does_not_declare_are_refused():
    with pytest.raises(ValueError, match="dirichlet: no setting 'classes_per_client'; possible are alpha"):
        partition("dirichlet", request(balanced(10), 4), classes_per_client=2)
    with pytest.raises(ValueError, match="alpha=0: must be greater than 0"):
        partition("dirichlet", request(balanced(10), 4), alpha=0)


@partitioner()
def first_rows(
    request, *, each: Annotated[int, Setting("what a client gets", "at least 2", lambda v: v >= 2)] = 4
) -> PartitionResult:
    """The first rows, so many to each client."""
    return PartitionResult(list(np.arange(request.num_clients * each).reshape(-1, each)))


def test_a_registered_function_is_all_that_a_new_partition_is(monkeypatch):
    monkeypatch.setitem(PARTITIONS, "first-rows", first_rows)
    raw = {"data": {"partition": "first-rows", "num_clients": 3}, "algorithms": [{"name": "local"}]}
    assert config.load(raw).data.partition_settings == {"each": 4}
    chosen = config.load(raw, ["data.each=5"])
    assert experiment.federation(chosen).class_counts().sum(1).tolist() == [5, 5, 5]
    written = tomllib.loads(config.dump(chosen))["data"]
    assert written["each"] == 5 and "alpha" not in written
    assert config.load({"data": written, "algorithms": raw["algorithms"]}).data == chosen.data
    for value, message in (("1", "data.each=1: must be at least 2"), ("2.5", "data.each=2.5: must be a whole number")):
        with pytest.raises(UserError, match=message):
            config.load(raw, [f"data.each={value}"])
    with pytest.warns(UserWarning, match=r"data\.each \(iid does not use it\)"):
        config.load(None, ["data.partition=iid", "data.each=5"])


def test_a_default_is_that_of_the_chosen_partition():
    assert config.load(None, ["data.partition=shards"]).data.partition_settings["classes_per_client"] == 2
    assert config.load(None, ["data.partition=dominant"]).data.partition_settings["classes_per_client"] == 3


def test_the_table_that_holds_the_settings_is_no_setting_itself():
    with pytest.raises(UserError, match=r"data\.partition_settings=1: no such setting"):
        config.load(None, ["data.partition_settings=1"])
