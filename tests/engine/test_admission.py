"""What a server takes of what it is sent: by hand, and against what every method's hooks give."""

from __future__ import annotations

import pytest
import torch

from personafl import ALGORITHMS, DMPFL
from personafl.core import tree
from personafl.core.types import Masked, Payload, Round, Stage
from personafl.engine import admission
from personafl.engine.admission import Entry, Update, refusal
from tests import worlds

W, MASK = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[True, False, True]])
UPLOAD: Payload = {"fc": Masked(W, MASK), "bias": torch.zeros(2), "on": torch.tensor([True])}
WANTED = {
    "fc": Entry((1, 3), torch.float32, masked=True),
    "bias": Entry((2,), torch.float32),
    "on": Entry((1,), torch.bool),
}


def test_what_the_hooks_ask_for_is_taken() -> None:
    stacked = {n: Masked(t.values[None], t.mask[None]) if isinstance(t, Masked) else t[None] for n, t in UPLOAD.items()}
    assert admission.schema(stacked) == WANTED
    assert refusal(Update(3, 5, UPLOAD, 7), WANTED, 5, 7, taken=[2]) == ""
    assert refusal(Update(3, 4, UPLOAD, 7), WANTED, 5, 7, oldest=4) == ""
    assert refusal(Update(3, 5, {}, 7), {}, 5, 7) == ""  # a method whose clients send nothing


WRONG: dict[str, tuple[Payload, str]] = {
    "empty": ({}, "an empty update"),
    "missing": (tree.exclude(UPLOAD, ["bias"]), "bias is missing"),
    "unknown": (UPLOAD | {"more": W}, "'more' is not asked for"),
    "dense": (UPLOAD | {"fc": W}, "fc is dense, not with its mask"),
    "masked": (UPLOAD | {"bias": Masked(W, MASK)}, "bias is with its mask, not dense"),
    "known": (UPLOAD | {"fc": Masked(W, MASK, known=True)}, "fc is under a known mask, not with its mask"),
    "type": (UPLOAD | {"bias": torch.zeros(2).double()}, "bias is of type float64, not float32"),
    "shape": (UPLOAD | {"bias": torch.zeros(2, 1)}, "bias is of shape (2, 1), not (2,)"),
    "nan": (UPLOAD | {"bias": torch.tensor([0, torch.nan])}, "bias is not finite"),
    "inf": (UPLOAD | {"fc": Masked(W / 0, MASK)}, "fc is not finite"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_they_would_not_give_is_refused_in_words(how: str) -> None:
    sent, why = WRONG[how]
    assert refusal(Update(3, 5, sent, 7), WANTED, 5, 7) == why


def test_updates_of_another_stage_second_ones_and_other_counts_are_refused() -> None:
    assert refusal(Update(3, 4, UPLOAD, 7), WANTED, 5, 7) == "an update of stage 4 in stage 5"
    assert refusal(Update(3, 6, UPLOAD, 7), WANTED, 5, 7, oldest=4) == "an update of stage 6 in stage 5"
    assert refusal(Update(3, 5, UPLOAD, 7), WANTED, 5, 7, taken=[3]) == "a second update in the same round"
    more = "an update of 8 examples from a client that has 7"
    assert refusal(Update(3, 5, UPLOAD, 8), WANTED, 5, 7) == more


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:.*units for")
def test_a_session_without_training_tells_what_every_upload_of_a_round_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it changes from round to round: FedSelect sends masks when it selects, DM-PFL goes by phases."""
    rounds = 8 if issubclass(ALGORITHMS[name], DMPFL) else 4
    sim = worlds.simulation(ALGORITHMS[name](), num_rounds=rounds, local_epochs=1)
    seen = worlds.watch_uploads(sim, monkeypatch)
    for _ in sim.schedule:
        before, count = sim.server, len(seen)
        sim.step()
        for _, upload, rnd in seen[count:]:
            wanted = admission.expected(sim.algorithm, sim.task, sim.model.initial, before, rnd)
            assert admission.schema(upload) == wanted
            assert not refusal(Update(0, rnd.number, tree.row_of(upload, 0), 1), wanted, rnd.number, 1)
    assert bool(seen) == (name != "local")


def test_rows_that_are_not_finite_are_found_and_named() -> None:
    big = torch.full((3, 2), 3e38)  # its sum overflows, its numbers do not
    assert admission.not_finite(torch.zeros(3), {"w": big}, {}) == {}
    broken = big.clone()
    broken[1, 0], broken[2, 1] = torch.nan, torch.inf
    loss = torch.tensor([0.0, 0.0, torch.nan])
    found = admission.not_finite(loss, {"w": Masked(broken, torch.ones(3, 2, dtype=torch.bool))}, {"w": big})
    assert found == {1: "w is not finite", 2: "its loss is not finite"}
    assert admission.not_finite(torch.zeros(3), {}, {"m": broken, "n": torch.zeros(3, 0)}) == {
        1: "its own m is not finite",
        2: "its own m is not finite",
    }
    assert admission.all_finite([]) and admission.all_finite([big, torch.tensor([1])])
    assert not admission.all_finite([big, broken])


def test_a_stage_without_a_download_has_a_schema_too() -> None:
    sim = worlds.simulation(ALGORITHMS["local"]())
    rnd = Round(Stage(0, down=False, up=False), 0.1)
    assert admission.expected(sim.algorithm, sim.task, sim.model.initial, sim.server, rnd) == {}


def assert_the_largest_is_found(device: str) -> None:
    """What is largest of tensors of several types on a device, and what one wrong number among them makes of it."""
    sizes = {torch.float32: 3e38, torch.float64: 1e300, torch.bfloat16: 3e38}  # squares and sums of them overflow
    fine = [torch.full((3, 70_000), size, dtype=kind, device=device) for kind, size in sizes.items()]
    beside = [torch.tensor([1], device=device), torch.zeros(3, 0, device=device), fine[0]]
    assert [t.tolist() for t in admission.largest([*fine, *beside])] == [[float(t[0, 0])] for t in fine]
    assert admission.all_finite([*fine, *beside])
    for wrong in (torch.nan, torch.inf, -torch.inf):
        for place, t in enumerate(fine):
            broken = t.clone()
            broken.view(-1)[69_999] = wrong
            held = [*fine[:place], broken, *fine[place + 1 :], *beside]
            assert not all(t.isfinite().all() for t in admission.largest(held)) and not admission.all_finite(held)


def test_the_largest_number_is_finite_only_if_all_are() -> None:
    assert admission.largest([]) == admission.largest([torch.zeros(0)]) == []
    assert admission.all_finite([]) and admission.all_finite([torch.zeros(0)])
    few = [torch.tensor([1.0, -3.0]), torch.tensor([2.0], dtype=torch.float64), torch.tensor([0.5])]
    assert [t.tolist() for t in admission.largest(few)] == [[3.0, 0.5], [2.0]]
    assert_the_largest_is_found("cpu")


def test_unchecked_numbers_are_finite_where_all_of_them_are() -> None:
    fine, wrong = torch.ones(3), torch.tensor([1.0, torch.nan])
    assert admission.UncheckedNumbers().are_finite()
    unchecked = admission.UncheckedNumbers()
    unchecked.add([fine])
    assert unchecked.are_finite()
    unchecked.add([wrong])
    assert not unchecked.are_finite()  # looked at without a reduction before
    unchecked = admission.UncheckedNumbers()
    unchecked.add([fine, wrong])
    unchecked.reduce()
    unchecked.add([fine])
    assert not unchecked.are_finite()  # of an earlier reduction


def test_what_is_written_to_before_it_is_looked_at_is_not_taken_for_fine() -> None:
    sent = torch.tensor([1.0, torch.nan])
    unchecked = admission.UncheckedNumbers()
    unchecked.add([sent])
    sent.nan_to_num_()
    assert not unchecked.are_finite()
