import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from personafl.core import wire
from personafl.core.types import Download, Layer, Masked, ModelInfo, Stage
from personafl.engine import cost
from personafl.models import MODELS, StackedModel

# Two linear layers: forward FLOP 2 * 12 + 4 = 28 and 2 * 8 + 2 = 18, together 46.
BODY = Layer("body.weight", "body.bias", (4, 3), macs=12, outputs=4)
HEAD = Layer("head.weight", "head.bias", (2, 4), macs=8, outputs=2)
SHAPES = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (2, 4), "head.bias": (2,)}
INFO = ModelInfo(SHAPES, frozenset(), frozenset({"head.weight", "head.bias"}), (BODY, HEAD))
ALL = tuple(SHAPES)


def half():
    """Two clients' masks of the body: 6 and 3 of 12 positions."""
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, :6] = True
    mask[1, :3] = True
    return mask.view(2, 4, 3)


@pytest.fixture(scope="module")
def cifar():
    return StackedModel(MODELS["cifar-cnn"].build((3, 32, 32), 10), torch.rand(2, 3, 32, 32))


# multiply-accumulates and outputs of the CIFAR CNN: images of 32, 28 (14), 10 (5) pixels
CIFAR = [
    ((64, 3, 5, 5), 64 * 28 * 28 * 75, 64 * 28 * 28),
    ((64, 64, 5, 5), 64 * 10 * 10 * 1600, 64 * 10 * 10),
    ((384, 1600), 384 * 1600, 384),
    ((192, 384), 192 * 384, 192),
    ((10, 192), 10 * 192, 10),
]
MACS, BIASES = sum(macs for _, macs, _ in CIFAR), sum(outputs for _, _, outputs in CIFAR)


def test_layers_of_the_cifar_cnn(cifar):
    assert [(layer.shape, layer.macs, layer.outputs) for layer in cifar.info.layers] == CIFAR
    assert cifar.info.other_flops == 0


def test_dense_forward_is_what_the_flop_counter_sees_and_the_biases(cifar):
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        cifar.module(torch.rand(2, 3, 32, 32))
    counted = counter.get_total_flops() / 2  # per example
    assert sum(cost.forward(layer) for layer in cifar.info.layers) == counted + BIASES
    assert counted == 2 * MACS == 29_386_496
    assert BIASES == 50_176 + 6_400 + 384 + 192 + 10


def test_a_training_step_is_three_forward_passes(cifar):
    masked, dense = cost.step(cifar.info, cifar.info.parameters, {}, 2)
    assert dense.tolist() == masked.tolist() == [3 * (2 * MACS + BIASES)] * 2


def test_a_training_step_is_the_flop_counters_and_the_first_layers_input_gradient_and_the_biases(cifar):
    counter = FlopCounterMode(display=False)
    with counter:
        cifar.module(torch.rand(2, 3, 32, 32)).sum().backward()
    counted = counter.get_total_flops() / 2
    dense = cost.step(cifar.info, cifar.info.parameters, {}, 1)[1].item()
    first = cifar.info.layers[0]
    assert dense - counted == 2 * first.macs + 3 * BIASES


def test_moving_only_the_head_costs_a_forward_pass_and_twice_the_head(cifar):
    head = cifar.info.layers[-1]
    dense = cost.step(cifar.info, cifar.info.head, {}, 1)[1].item()
    assert dense == 2 * MACS + BIASES + 2 * (2 * head.macs + head.outputs)


def test_moving_only_the_body_carries_gradients_through_the_head():
    dense = cost.step(INFO, ["body.weight", "body.bias"], {}, 1)[1]
    assert dense.tolist() == [3 * 28 + 2 * 18]  # the head: forward and the gradient of its input


def test_a_bias_alone_moves_its_layer():
    assert cost.step(INFO, ["head.bias"], {}, 1)[1].tolist() == [28 + 3 * 18]


def test_density_is_each_clients_own():
    assert cost.density(half()).tolist() == [0.5, 0.25]
    assert cost.density(half()).dtype == torch.float64


def test_a_mask_costs_its_density_and_biases_stay():
    masked, dense = cost.step(INFO, ALL, {"body.weight": half()}, 2)
    # body: 24 * 0.5 + 4 = 16 and 24 * 0.25 + 4 = 10
    assert masked.tolist() == [3 * 16 + 3 * 18, 3 * 10 + 3 * 18]
    assert dense.tolist() == [3 * 46, 3 * 46]


def test_regrowth_needs_the_dense_weight_gradient():
    masked, dense = cost.step(INFO, ALL, {"body.weight": half()}, 2, regrow=True)
    assert masked.tolist() == [2 * 16 + 28 + 3 * 18, 2 * 10 + 28 + 3 * 18]
    assert dense.tolist() == [3 * 46, 3 * 46]


def test_a_frozen_masked_layer_costs_its_sparse_forward():
    masked, dense = cost.step(INFO, INFO.head, {"body.weight": half()}, 2)
    assert masked.tolist() == [16 + 3 * 18, 10 + 3 * 18]
    assert dense.tolist() == [28 + 3 * 18] * 2


def test_a_density_costs_what_masks_of_that_density_do():
    """6 and 3 of 12 weights, 2 and 1 of 4 units: the forward pass of the body is 2 * 6 + 2 and 2 * 3 + 1."""
    on = torch.tensor([[True, True, False, False], [True, False, False, False]])
    by_mask = cost.step(INFO, ALL, {"body.weight": half(), "body.bias": on}, 2)
    shares = torch.tensor([0.5, 0.25], dtype=torch.float64)
    by_share = cost.step(INFO, ALL, {"body.weight": shares, "body.bias": shares}, 2)
    assert by_mask[0].tolist() == by_share[0].tolist() == [3 * 14 + 3 * 18, 3 * 7 + 3 * 18]
    assert by_mask[1].tolist() == by_share[1].tolist() == [3 * 46] * 2


def test_an_expected_cost_is_a_whole_number():
    masked, _ = cost.step(INFO, ALL, {"body.weight": torch.tensor([1 / 7])}, 1)
    assert masked.tolist() == [76]  # 3 * (24 / 7 + 4) + 3 * 18 = 76.3


def test_a_second_model_costs_its_own_masks():
    both = [*ALL, *(f"personal/{n}" for n in ALL)]
    masked, dense = cost.step(INFO, both, {"personal/body.weight": half()}, 2)
    assert dense.tolist() == [2 * 3 * 46] * 2
    assert masked.tolist() == [3 * 46 + 3 * 16 + 3 * 18, 3 * 46 + 3 * 10 + 3 * 18]


def test_what_is_no_parameter_of_the_model_costs_nothing():
    assert cost.step(INFO, ["theta/alpha"], {}, 2)[1].tolist() == [0, 0]


def test_a_norm_that_moves_asks_for_every_gradient_behind_it():
    norm = ModelInfo(SHAPES | {"norm.weight": (3,)}, frozenset(), INFO.head, (BODY, HEAD), other_flops=5)
    assert cost.step(norm, ["norm.weight"], {}, 1)[1].tolist() == [3 * 5 + 2 * 28 + 2 * 18]
    assert cost.step(norm, ["head.bias"], {}, 1)[1].tolist() == [5 + 28 + 3 * 18]


def test_a_product_of_activations_has_two_gradients_where_something_before_it_moves():
    """Attention's products between body and head: 10 FLOP, beside 5 of frozen layers before both."""
    info = dataclasses.replace(INFO, other_flops=5 + 10, products={1: 10})
    assert cost.forward_pass(info) == 46 + 15
    assert cost.step(info, ALL, {}, 1)[1].tolist() == [3 * 46 + 5 + 3 * 10]
    assert cost.step(info, INFO.head, {}, 1)[1].tolist() == [28 + 3 * 18 + 5 + 10]
    assert cost.step(info, ["body.weight"], {"body.weight": half()}, 2)[0].tolist() == [
        3 * 16 + 2 * 18 + 5 + 3 * 10,
        3 * 10 + 2 * 18 + 5 + 3 * 10,
    ]


# Bytes: a message has 6, an entry called "w" has 6 and 4 per axis; two clients


def sent(known=False):
    """Three of twelve weights of the first client and all of the second's."""
    mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    mask[0, 0, :3] = True
    mask[1] = True
    return {"w": Masked(torch.ones(2, 3, 4), mask, known)}


def test_a_shared_download_is_received_by_every_client():
    down = Download(shared={"w": torch.zeros(3, 4)})
    assert cost.traffic(Stage(0), down, {}, 2).down == 2 * (wire.size({}) + (6 + 2 * 4) + 12 * 4)


def test_own_rows_travel_in_the_same_message():
    down = Download(shared={"w": torch.zeros(3, 4)}, own={"a": torch.zeros(2, 1)})
    one = len(wire.pack({"w": torch.zeros(3, 4), "a": torch.zeros(1)}))
    assert cost.traffic(Stage(0), down, {}, 2).down == 2 * one


@pytest.mark.parametrize("known", [False, True])
def test_uploads_are_what_the_codec_packs_of_each(known):
    # 12 positions are two bytes of bits, which is less than three or twelve positions of two bytes each
    mask = 0 if known else 2
    head = wire.size({}) + (6 + 2 * 4) + 4
    assert cost.traffic(Stage(0), Download(), sent(known), 2).up == 2 * (head + mask) + (3 + 12) * 4


def test_the_papers_count_has_no_headers_and_is_the_mean_of_both_directions():
    down = Download(
        shared={"w": torch.zeros(3, 4), "counter": torch.zeros(3, dtype=torch.int64)}, own={"a": torch.zeros(2, 1)}
    )
    up = 4 * (3 + 12) + 2 * 12 / 8  # values, and a bit for each of twelve weights of two clients
    assert cost.traffic(Stage(0), down, sent(), 2).paper == (2 * 12 * 4 + 2 * 4 + up) / 2
    assert cost.traffic(Stage(0), down, sent(known=True), 2).paper == (2 * 12 * 4 + 2 * 4 + 4 * 15) / 2


def test_half_precision_counts_four_bytes_in_the_papers_count_only():
    down = Download(shared={"w": torch.zeros(3, 4, dtype=torch.float16)})
    found = cost.traffic(Stage(0), down, {}, 1)
    assert found.down == wire.size({}) + (6 + 2 * 4) + 12 * 2
    assert found.paper == 12 * 4 / 2


def test_a_stage_in_which_nothing_travels_costs_no_bytes():
    down = Download(shared={"w": torch.zeros(3, 4)})
    silent = cost.traffic(Stage(0, down=False, up=False), Download(), {}, 2)
    assert (silent.up, silent.down, silent.paper) == (0, 0, 0)
    unseen = cost.traffic(Stage(0, in_paper=False), down, sent(), 2)
    assert unseen.paper == 0
    assert unseen.down > 0
    assert unseen.up > 0
