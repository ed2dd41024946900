"""FedMMD: the discrepancy, and what its teacher costs."""

from __future__ import annotations

import pytest

from personafl import FedAvg, FedMMD
from tests import checks


def test_without_its_discrepancy_fedmmd_is_fedavg() -> None:
    checks.assert_close(checks.played(FedMMD(discrepancy_weight=0.0)).server, checks.played(FedAvg()).server)


def test_the_teacher_costs_a_forward_pass() -> None:
    base = checks.played(FedAvg()).totals.flops  # three forward passes an example
    assert checks.played(FedMMD()).totals.flops == pytest.approx(base * 4 / 3)
