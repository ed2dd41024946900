"""docs/reference.md against the code."""

from __future__ import annotations

import pytest
from tools import reference


def test_the_page_is_what_the_code_gives() -> None:
    text = reference.PAGE.read_text(encoding="utf-8")
    assert reference.filled(text) == text, "run python tools/reference.py"


def test_a_table_that_is_out_of_date_is_written_anew() -> None:
    text = reference.PAGE.read_text(encoding="utf-8")
    assert reference.filled(text.replace("| momentum of sgd |", "| something else |")) == text
    with pytest.raises(ValueError, match="<!-- model --> and <!-- /model --> must be there once each"):
        reference.filled(text.replace("<!-- model -->", ""))


def test_every_key_is_a_row_with_its_default_and_who_looks_at_it() -> None:
    rows = reference.table("training").splitlines()
    (rounds,) = (row for row in rows if "`training.num_rounds`" in row)
    assert rounds.endswith(
        "| integer | `100` or by the data | rounds of communication | at least 1 and at most 1000000 |  |"
    )
    (momentum,) = (row for row in rows if "`training.momentum`" in row)
    assert momentum.endswith("| all but co-pfl; each may have its own, as ditto.momentum; scaffold has 0.0 |")
    assert "`personafl list datasets`" in reference.table("data")
