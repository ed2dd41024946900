import pytest
import torch

from personafl.core import tree
from personafl.core.types import Download, Masked

ABC = {"a.weight": 1, "a.bias": 2, "b.weight": 3}


def test_select_and_exclude_are_the_tree_in_two_parts():
    names = {"a.bias", "b.weight", "not there"}
    assert tree.select(ABC, names) == {"a.bias": 2, "b.weight": 3}
    assert tree.exclude(ABC, names) == {"a.weight": 1}
    assert tree.select(ABC, names) | tree.exclude(ABC, names) == ABC


def test_under_is_the_inverse_of_prefixed():
    two = ABC | tree.prefixed(ABC, "global")
    assert tree.under(two, "global") == ABC
    assert tree.under(two, "glob") == {}


def test_the_prefix_names_the_model_a_tensor_belongs_to():
    assert tree.prefix_of("fc.weight") == ""
    assert tree.prefix_of("personal/fc.weight") == "personal"


def test_stack_repeats_without_memory():
    base = {"w": torch.tensor([1.0, 2.0]), "scale": torch.tensor(3.0)}
    out = tree.stack(base, 3)
    assert out["w"].tolist() == [[1, 2]] * 3
    assert out["scale"].tolist() == [3, 3, 3]
    assert out["w"].data_ptr() == base["w"].data_ptr()
    assert out["w"].stride(0) == 0


def test_take_and_join_are_each_others_inverse():
    stacked = {"w": torch.arange(6.0).view(3, 2), "n": torch.arange(3)}
    parts = [tree.take(stacked, slice(0, 1)), tree.take(stacked, torch.tensor([1, 2]))]
    assert [tree.rows(p) for p in parts] == [1, 2]
    joined = tree.join(parts)
    assert joined.keys() == stacked.keys()
    assert all(torch.equal(joined[n], stacked[n]) for n in stacked)


def test_a_masked_tensor_has_zeros_outside_its_mask():
    entry = Masked(torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([True, False, True]))
    assert entry.values.tolist() == [1, 0, 3]


def test_a_masked_tensor_keeps_its_type():
    mask = torch.tensor([True, False])
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int32, torch.int64, torch.bool):
        assert Masked(torch.ones(2, dtype=dtype), mask).values.dtype == dtype


def test_values_and_masks_take_a_payload_apart():
    mask = torch.tensor([True, False])
    payload = {"dense": torch.ones(2), "sparse": Masked(torch.tensor([5.0, 6.0]), mask)}
    values = tree.values(payload)
    assert values["dense"].tolist() == [1, 1]
    assert values["sparse"].tolist() == [5, 0]
    assert list(tree.masks(payload)) == ["sparse"]
    assert torch.equal(tree.masks(payload)["sparse"], mask)


def test_a_download_reaches_every_client_and_own_rows_stay_its_own():
    mask = torch.tensor([True, False])
    down = Download(
        shared={"w": torch.tensor([1.0, 2.0]), "m": Masked(torch.tensor([3.0, 4.0]), mask, known=True)},
        own={"head": torch.tensor([[7.0], [8.0], [9.0]])},
    )
    got = tree.received(down, 3)
    assert got["w"].tolist() == [[1, 2]] * 3
    assert got["head"].tolist() == [[7], [8], [9]]
    assert isinstance(got["m"], Masked)
    assert got["m"].known
    assert got["m"].values.tolist() == [[3, 0]] * 3
    assert got["m"].mask.tolist() == [[True, False]] * 3


def test_squared_distance_sums_over_all_tensors_of_each_client():
    a = {"w": torch.tensor([[1.0, 2.0], [0.0, 0.0]]), "b": torch.tensor([[1.0], [5.0]])}
    b = {"w": torch.tensor([[0.0, 0.0], [0.0, 3.0]]), "b": torch.tensor([[1.0], [1.0]])}
    assert tree.squared_distance(a, b).tolist() == [1 + 4 + 0, 0 + 9 + 16]


def test_squared_distance_takes_parameters_that_are_one_number():
    a, b = {"scale": torch.tensor([1.0, 5.0])}, {"scale": torch.tensor([3.0, 5.0])}
    assert tree.squared_distance(a, b).tolist() == [4, 0]


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 4)])
def test_a_column_scales_each_client(shape):
    scaled = torch.ones(shape) * tree.column(torch.tensor([1.0, 2.0, 3.0]), torch.ones(shape))
    assert scaled.shape == shape
    assert scaled.reshape(3, -1)[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_masked_numbers_are_those_of_a_choice(dtype):
    t = torch.tensor([[1.5, -2.0, 0.0], [-0.0, 7.0, -1.0]]).to(dtype)
    if t.is_floating_point():
        t = torch.cat([t, torch.tensor([[torch.inf, -torch.inf, torch.nan]], dtype=dtype)])
    for mask in (torch.eye(3).bool()[: len(t)], torch.zeros(t.shape).bool(), torch.ones(t.shape).bool()):
        found, chosen = tree.masked(t, mask), torch.where(mask, t, 0)
        assert found.dtype == dtype
        assert torch.equal(found.nan_to_num(9), chosen.nan_to_num(9))
        if t.is_floating_point():
            assert torch.equal(found.signbit(), chosen.signbit())
    assert torch.equal(tree.masked(t.T, mask.T).nan_to_num(9), t.T.nan_to_num(9))


def test_a_gradient_goes_through_a_mask():
    t = torch.ones(3, requires_grad=True)
    tree.masked(t, torch.tensor([True, False, True])).sum().backward()
    assert t.grad.tolist() == [1, 0, 1]


def test_tensors_of_several_types_are_converted_to_one_or_to_several():
    held = {"a": torch.tensor([0.5, 3.0]), "b": torch.tensor([2.5], dtype=torch.float64), "c": torch.tensor([7])}
    wide = tree.converted(held, torch.float64)
    assert list(wide) == list(held) and all(t.dtype == torch.float64 for t in wide.values())
    assert [t.tolist() for t in wide.values()] == [[0.5, 3.0], [2.5], [7.0]]
    assert wide["b"].data_ptr() != held["b"].data_ptr()
    back = tree.converted(wide, held)
    assert all(back[n].dtype == t.dtype and torch.equal(back[n], t) for n, t in held.items())
    assert tree.converted({}, torch.float64) == {}
