"""What a recipe is refused for before any client is waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import pytest

from personafl import ALGORITHMS, DMPFL, config
from personafl.core.errors import UserError
from personafl.core.types import Setup
from personafl.deployment.early_checks import check_before_clients
from tests.deployment import worlds


def checked(method: str | dict[str, Any], **training: Any) -> None:
    text = {"training": training, "data": {"validation_share": 0.2}}
    entry = {"name": method} if isinstance(method, str) else method
    check_before_clients(config.load(worlds.RECIPE | text | {"algorithms": [entry]}), 4)


BOUND = {
    "dm-pfl": "DMPFL",
    "dm-pfl-plus": "DMPFLPlus",
    "fedphp": "inherit of FedPHP",
    "feddst": "FedDST",
    "fedpews": "FedPeWS",
    "fedpews-fixed": "FedPeWSFixed",
}
"""Methods that depend on the number of rounds, and the part of them that is responsible."""


@pytest.mark.parametrize("method", sorted(ALGORITHMS))
def test_a_method_that_needs_all_rounds_is_refused_at_once(method: str) -> None:
    checked(method)
    if method not in BOUND:
        checked(method, target=0.9, patience=2)
        return
    for key, value in (("target", 0.9), ("patience", 2)):
        with pytest.raises(UserError, match=rf"{BOUND[method]} cannot be combined with training\.{key}={value}, "):
            checked(method, **{key: value})


def test_patience_without_validation_data_is_refused_at_once() -> None:
    recipe = config.load(worlds.RECIPE | {"training": {"patience": 2}, "algorithms": ["fedavg"]})
    with pytest.raises(UserError, match=r"training\.patience=2: needs validation data"):
        check_before_clients(recipe, 4)


def test_calibration_without_validation_data_is_refused_at_once() -> None:
    method = {"name": "ditto", "inference": {"name": "batch", "calibrate": True}}
    checked(method)
    with pytest.raises(UserError, match=r"calibrate=true: needs validation data"):
        check_before_clients(config.load(worlds.RECIPE | {"algorithms": [method]}), 4)


def test_a_target_out_of_reach_is_refused_where_the_metric_is_known() -> None:
    checked("fedavg", target=25.0)  # data may be of a regression
    with pytest.raises(UserError, match=r"training\.target=25: must be a share"):
        checked("fedavg", target=25.0, task="classification")


@dataclass(frozen=True, kw_only=True)
class ForPictures(DMPFL):
    """One that takes no other model than its own."""

    def bind(self, setup: Setup) -> Self:
        raise UserError("no convolutions")


def test_a_method_for_another_model_than_the_stand_in_is_left_to_the_data() -> None:
    checked(f"{__name__}:ForPictures", target=0.9)


def test_a_filled_slot_counts_too() -> None:
    fedavg = {"name": "fedavg", "inherit": {"momentum": "mu-c"}}
    with pytest.raises(UserError, match="The plug-in inherit of FedAvg cannot be combined"):
        checked(fedavg, target=0.9)
