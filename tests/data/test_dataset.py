"""Data sets before they are divided: what is checked of them, and their hash."""

import dataclasses

import numpy as np
import pytest
import torch

from personafl.core.normalization import Normalization
from personafl.data.dataset import Source, arrays


def test_arrays_take_lists_and_numpy():
    s = arrays(np.array([[1.0, 2.0], [3.0, 4.0]]), [0, 2])
    assert s.x.dtype == torch.float32
    assert s.y.tolist() == [0, 2]
    assert s.y.dtype == torch.int64
    assert s.classes == 3  # the largest label and one
    assert arrays([[1.0]], [0], classes=5).classes == 5


def test_whole_labels_in_floating_point_are_classes_where_that_is_asked():
    y = np.array([1.0, 0.0])
    assert arrays([[1.0], [2.0]], y).task == "regression"
    made = arrays([[1.0], [2.0]], y, task="classification")
    assert (made.y.tolist(), made.y.dtype, made.classes) == ([1, 0], torch.int64, 2)


def test_targets_of_other_tasks():
    x = [[1.0]] * 2
    floats = arrays(x, np.array([[0.5, 1.0], [2.0, 3.0]]))
    assert (floats.task, floats.y.dtype, floats.classes) == ("regression", torch.float32, 2)
    bits = arrays(x, np.array([[True, False, True]] * 2))
    assert (bits.task, bits.y.dtype, bits.classes) == ("multilabel", torch.uint8, 3)
    tokens = arrays(np.array([[7, 0], [1, 2]]), np.array([[0, 1], [2, -100]]))
    assert (tokens.task, tokens.classes, tokens.model) == ("sequence", 8, "token-lstm")  # token 7 is in an example
    assert arrays(x, [[0, 1]] * 2, task="multilabel").classes == 2


def test_targets_may_be_taken_for_another_task_s():
    bits = arrays([[1.0]] * 2, [[0, 1], [1, 1]], clients=["a", "b"])
    assert bits.task == "sequence"
    again = bits.as_task("multilabel")
    assert (again.task, again.classes, again.y.tolist()) == ("multilabel", 2, [[0, 1], [1, 1]])
    assert again.names == ("a", "b") and again.x is bits.x
    assert bits.as_task("auto") is bits and bits.as_task("sequence") is bits
    with pytest.raises(ValueError, match="arrays: classification needs one whole number per example"):
        bits.as_task("classification")


def test_client_names_become_numbers():
    s = arrays([[1.0]] * 4, [0, 0, 1, 1], clients=["b", "a", "b", "c"])
    assert s.clients.tolist() == [1, 0, 1, 2]
    assert s.clients.dtype == np.int64


@pytest.mark.parametrize(
    ("bad", "message"), [(float("nan"), "NaN, the only missing value"), (float("inf"), "NaN or infinity")]
)
def test_an_example_that_is_not_finite_is_refused(bad, message):
    with pytest.raises(ValueError, match=f"mine: example 2 contains {message}"):
        arrays([[1.0], [2.0], [bad]], [0, 1, 0], name="mine")


def test_an_example_that_is_one_number_and_not_finite_is_refused():
    with pytest.raises(ValueError, match="mine: example 1 contains NaN or infinity"):
        arrays([1.0, float("-inf")], [0, 1], name="mine")


def test_labels_that_are_text_become_numbers_with_names():
    made = arrays([[1.0]] * 4, np.array(["walk", "run", "walk", "sit"]))
    assert (made.y.tolist(), made.classes, made.class_names) == ([2, 0, 2, 1], 3, ("run", "sit", "walk"))
    assert arrays([[1.0]] * 2, ["b", "a"]).y.tolist() == [1, 0]
    for wrong in ([["a"], ["b"]], np.array(["a", 1], object)):
        with pytest.raises(ValueError, match="labels must be numbers, or text, one for each example"):
            arrays([[1.0]] * 2, wrong)


def test_labels_in_a_column_are_one_per_example():
    assert arrays([[1.0]] * 2, [[1], [0]]).y.tolist() == [1, 0]


def test_the_hash_knows_the_normalisation():
    plain = arrays([[1.0, 2.0], [3.0, 4.0]], [0, 1])
    made = [dataclasses.replace(plain, normalization=Normalization(m, (1.0,))) for m in ((0.0,), (0.0, 1.0))]
    assert len({plain.digest, *(s.digest for s in made)}) == 3
    assert dataclasses.replace(made[0]).digest == made[0].digest
    assert dataclasses.replace(made[0], normalization=None).digest == plain.digest


def test_a_normalisation_must_fit():
    with pytest.raises(ValueError, match=r"toy: Normalization\(mean=\(0.0,\).*does not fit examples of shape \(3, 8\)"):
        Source("toy", torch.zeros(2, 3, 8), torch.zeros(2).long(), 1, normalization=Normalization((0.0,), (1.0,)))


def test_names_of_classes_and_features_must_fit():
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="toy: 1 classes but 2 names of classes"):
        Source("toy", x, y, 1, class_names=("a", "b"))
    with pytest.raises(ValueError, match=r"toy: 2 names of features for examples of shape \(3,\)"):
        Source("toy", x, y, 1, feature_names=("a", "b"))


@pytest.mark.parametrize(("label", "at"), [(4, 1), (-1, 0)])
def test_a_label_out_of_range_is_refused(label, at):
    labels = [0, 0, 3]
    labels[at] = label
    with pytest.raises(ValueError, match=rf"label {label} of example {at} is not in 0\.\.3"):
        arrays([[1.0]] * 3, labels, classes=4)


@pytest.mark.parametrize("label", [0.5, float("nan")])
def test_a_label_that_is_no_whole_number_is_no_class(label):
    with pytest.raises(ValueError, match=f"target {label} of example 1 is no whole number"):
        arrays([[1.0]] * 2, [0.0, label], task="classification")


def test_a_target_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="mine: target nan of example 1 is not finite"):
        arrays([[1.0]] * 2, [0.0, float("nan")], name="mine")


def test_another_number_of_labels_than_examples_is_refused():
    with pytest.raises(ValueError, match="3 examples but 2 labels"):
        arrays([[1.0]] * 3, [0, 1])


def test_another_number_of_client_ids_than_examples_is_refused():
    with pytest.raises(ValueError, match="2 examples but 3 client ids"):
        arrays([[1.0]] * 2, [0, 1], clients=[0, 1, 2])


def test_no_examples_are_refused():
    with pytest.raises(ValueError, match="no examples"):
        arrays(np.zeros((0, 3)), np.zeros(0, int))


def test_a_test_mask_must_fit():
    with pytest.raises(ValueError, match="60 examples but 3 entries in test"):
        Source("toy", torch.zeros(60, 1), torch.zeros(60, dtype=torch.int64), 1, test=np.zeros(3, bool))
    with pytest.raises(ValueError, match="test must be true or false"):
        Source("toy", torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), 1, test=np.zeros(2))


def test_arrays_keep_what_their_clients_are_called():
    made = arrays([[0.0], [1.0], [2.0]], [0, 1, 0], clients=["ben", "anna", "ben"])
    assert made.names == ("anna", "ben")
    assert made.clients.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="toy: 1 names, too few for client 1"):
        Source("toy", torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), 1, clients=np.array([0, 1]), names=("a",))


def source(n=60, classes=4):
    return Source("toy", torch.arange(float(n)).unsqueeze(1), torch.arange(n) % classes, classes)


def test_the_hash_of_data_tells_examples_labels_names_and_corruption_apart():
    plain = source()
    moved = dataclasses.replace(plain, x=plain.x + (torch.arange(60) == 30).unsqueeze(1))
    others = [
        dataclasses.replace(plain, name="other"),
        dataclasses.replace(plain, y=plain.y.flip(0)),
        dataclasses.replace(plain, x=plain.x.double()),
        dataclasses.replace(plain, x=plain.x.view(60, 1, 1)),
        dataclasses.replace(plain, corruption=("fog", 5)),
        moved,
    ]
    assert plain.digest == source().digest
    assert len({s.digest for s in (plain, *others)}) == 7


def test_entries_of_another_length_are_refused():
    with pytest.raises(ValueError, match="toy: 2 examples but 3 groups"):
        Source("toy", torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), 1, groups=np.zeros(3, np.int64))


def test_examples_that_are_no_array_are_refused_and_those_of_autograd_taken():
    with pytest.raises(ValueError, match="arrays: examples and targets must be numbers"):
        arrays({"a": np.ones((4, 2))}, np.zeros(4, int))
    x = torch.ones(4, 2, requires_grad=True)
    assert not arrays(x, np.zeros(4, int)).x.requires_grad and x.requires_grad
