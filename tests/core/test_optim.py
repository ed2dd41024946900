import dataclasses

import pytest
import torch

from personafl.core import optim, tree
from personafl.core.optim import SGD, Adam
from personafl.core.types import Training

SHAPES = {"w": (2, 4), "b": (2,), "personal/w": (2, 4)}
CLIENTS, STEPS, LR = 3, 5, 0.1
CASES = {
    "sgd": (SGD(), torch.optim.SGD, {}),
    "sgd-momentum": (SGD(momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "sgd-decay": (SGD(weight_decay=0.2), torch.optim.SGD, {"weight_decay": 0.2}),
    "sgd-clip": (SGD(grad_clip=1.0), torch.optim.SGD, {}),
    "sgd-all": (SGD(0.9, 0.2, 1.0), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.2}),
    "adam": (Adam(), torch.optim.Adam, {}),
    "adam-betas": (Adam(beta1=0.5, beta2=0.9, eps=1e-3), torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
    "adamw": (Adam(weight_decay=0.2, decoupled=True), torch.optim.AdamW, {"weight_decay": 0.2}),
    "adamw-clip": (
        Adam(weight_decay=0.2, grad_clip=1.0, decoupled=True),
        torch.optim.AdamW,
        {"weight_decay": 0.2},
    ),
    "adam-all": (Adam(weight_decay=0.2, grad_clip=1.0), torch.optim.Adam, {"weight_decay": 0.2}),
}
EACH_CASE = pytest.mark.parametrize(("rule", "torch_rule", "settings"), CASES.values(), ids=CASES)


def draw(seed, clients=CLIENTS, shapes=None):
    g = torch.Generator().manual_seed(seed)
    shapes = shapes or SHAPES
    return {n: torch.randn(clients, *s, generator=g, dtype=torch.float64) for n, s in shapes.items()}


def gradients(step):
    """Gradients of norms around 0.03, 3 and 30: the first client is below a clip of 1, the others above it."""
    scale = torch.tensor([0.01, 1.0, 10.0], dtype=torch.float64)
    return {n: g * tree.column(scale, g) for n, g in draw(100 + step).items()}


def clip(parameters, bound):
    """PyTorch's own clip, for each model of the client by itself."""
    for prefix in {tree.prefix_of(n) for n in parameters}:
        own = [p for n, p in parameters.items() if tree.prefix_of(n) == prefix]
        torch.nn.utils.clip_grad_norm_(own, bound)


def alone(start, grads, torch_rule, settings, bound):
    """One client's own tensors under torch.optim; `grads` has one dict per step."""
    parameters = {n: torch.nn.Parameter(t.clone()) for n, t in start.items()}
    rule = torch_rule(list(parameters.values()), lr=LR, **settings)
    for step in grads:
        for n, p in parameters.items():
            p.grad = step[n].clone()
        if bound:
            clip(parameters, bound)
        rule.step()
    return {n: p.detach() for n, p in parameters.items()}


def same_bits(a, b):
    return torch.equal(a.view(torch.int64), b.view(torch.int64))


@EACH_CASE
def test_a_stack_moves_as_torch_moves_each_client(rule, torch_rule, settings):
    start = draw(0)
    params = {n: t.clone() for n, t in start.items()}
    state = rule.init(params)
    for step in range(STEPS):
        rule.step(params, gradients(step), state, dict.fromkeys(params), LR)
    for c in range(CLIENTS):
        grads = [{n: g[c] for n, g in gradients(step).items()} for step in range(STEPS)]
        expected = alone({n: t[c] for n, t in start.items()}, grads, torch_rule, settings, rule.grad_clip)
        for n, t in expected.items():
            torch.testing.assert_close(params[n][c], t, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", [SGD(0.9, 0.2, 1.0, joint_clip=True), Adam(grad_clip=1.0, joint_clip=True)])
def test_a_joint_clip_bounds_all_models_of_a_client_together(rule):
    """As one model whose names have no prefix."""
    plain = {n: n.replace("/", "-") for n in SHAPES}
    params, one = draw(0), {plain[n]: t for n, t in draw(0).items()}
    state, state_of_one = rule.init(params), rule.init(one)
    apart, own = draw(0), dataclasses.replace(rule, joint_clip=False)
    state_apart = own.init(apart)
    for step in range(STEPS):
        grads = gradients(step)
        rule.step(params, grads, state, dict.fromkeys(params), LR)
        own.step(one, {plain[n]: g for n, g in grads.items()}, state_of_one, dict.fromkeys(one), LR)
        own.step(apart, grads, state_apart, dict.fromkeys(apart), LR)
    for n, t in params.items():
        assert torch.equal(t, one[plain[n]])
        assert torch.equal(t[0], apart[n][0])  # below either bound
        assert not torch.equal(t[1:], apart[n][1:])


@EACH_CASE
def test_positions_in_the_mask_move_as_if_there_were_no_others(rule, torch_rule, settings):
    start, masks = draw(0), {n: t > 0 for n, t in draw(1).items()}
    params = {n: t.clone() for n, t in start.items()}
    state = rule.init(params)
    for step in range(STEPS):
        rule.step(params, gradients(step), state, masks, LR)
    for c in range(CLIENTS):
        grads = [{n: g[c][masks[n][c]] for n, g in gradients(step).items()} for step in range(STEPS)]
        inside = {n: t[c][masks[n][c]] for n, t in start.items()}  # a shorter tensor: only what may move
        for n, t in alone(inside, grads, torch_rule, settings, rule.grad_clip).items():
            torch.testing.assert_close(params[n][c][masks[n][c]], t, rtol=1e-12, atol=1e-12)


@EACH_CASE
def test_positions_outside_the_mask_keep_value_and_moments_bitwise(rule, torch_rule, settings):
    params, masks = draw(0), {n: t > 0 for n, t in draw(1).items()}
    params["w"][:, 0, 0], masks["w"][:, 0, 0] = -0.0, False
    state = rule.init(params)
    rule.step(params, gradients(0), state, dict.fromkeys(params), LR)  # moments everywhere
    before = {n: t.clone() for n, t in (params | state).items()}
    for step in range(1, STEPS):
        grads = {n: g.masked_fill(~masks[n], torch.nan) for n, g in gradients(step).items()}  # must not be looked at
        rule.step(params, grads, state, masks, LR)
    for n, t in (params | state).items():
        if n.startswith("steps/"):
            continue
        mask = masks[n.removeprefix("momentum/").removeprefix("first/").removeprefix("second/")]
        assert same_bits(t[~mask], before[n][~mask])
        assert not torch.equal(t[mask], before[n][mask])


@EACH_CASE
def test_a_step_of_the_first_clients_leaves_the_others_bitwise_unchanged(rule, torch_rule, settings):
    params = draw(0)
    state = rule.init(params)
    rule.step(params, gradients(0), state, dict.fromkeys(params), LR)
    before = {n: t.clone() for n, t in (params | state).items()}
    first = slice(2)
    rule.step(
        tree.take(params, first),
        tree.take(gradients(1), first),
        tree.take(state, first),
        dict.fromkeys(params),
        LR,
    )
    for n, t in (params | state).items():
        assert torch.equal(t[2:], before[n][2:])
        assert not torch.equal(t[:2], before[n][:2])


def test_adam_corrects_by_each_clients_own_number_of_steps():
    start = draw(0)
    params = {n: t.clone() for n, t in start.items()}
    rule = Adam()
    state = rule.init(params)
    taken = []  # who took part in which step: 3, 1, 1, 3 clients
    for step, k in enumerate((3, 1, 1, 3)):
        grads = gradients(step)
        rule.step(
            tree.take(params, slice(k)),
            tree.take(grads, slice(k)),
            tree.take(state, slice(k)),
            dict.fromkeys(params),
            LR,
        )
        taken.append((k, grads))
    assert state["steps/w"].tolist() == [4, 2, 2]
    for c in range(CLIENTS):
        grads = [{n: g[c] for n, g in step.items()} for k, step in taken if c < k]
        for n, t in alone({n: t[c] for n, t in start.items()}, grads, torch.optim.Adam, {}, 0).items():
            torch.testing.assert_close(params[n][c], t, rtol=1e-12, atol=1e-12)


def test_a_step_of_sgd_in_numbers():
    params = {"w": torch.tensor([[1.0, 2.0]])}
    rule = SGD(momentum=0.5, weight_decay=0.1)
    state = rule.init(params)
    moves = {"w": torch.tensor([[True, False]])}
    grads = {"w": torch.tensor([[3.0, 3.0]])}
    rule.step(params, grads, state, moves, 0.1)  # 3 + 0.1 * 1 = 3.1; 1 - 0.1 * 3.1 = 0.69
    torch.testing.assert_close(params["w"], torch.tensor([[0.69, 2.0]]))
    rule.step(params, grads, state, moves, 0.1)  # 0.5 * 3.1 + 3 + 0.069 = 4.619; 0.69 - 0.4619 = 0.2281
    torch.testing.assert_close(params["w"], torch.tensor([[0.2281, 2.0]]))
    torch.testing.assert_close(state["momentum/w"], torch.tensor([[4.619, 0.0]]))


def test_the_clip_bounds_each_model_of_each_client_by_itself():
    params = {"w": torch.zeros(2, 2, dtype=torch.float64), "personal/w": torch.zeros(2, 2, dtype=torch.float64)}
    grads = {
        "w": torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=torch.float64),  # norms 5 and 0.5
        "personal/w": torch.tensor([[0.0, 0.1], [6.0, 8.0]], dtype=torch.float64),  # norms 0.1 and 10
    }
    SGD(grad_clip=1.0).step(params, grads, {}, dict.fromkeys(params), 1.0)
    expected = {"w": [[-0.6, -0.8], [-0.3, -0.4]], "personal/w": [[0.0, -0.1], [-0.6, -0.8]]}
    for n, rows in expected.items():  # torch's clip divides by norm + 1e-6
        torch.testing.assert_close(params[n], torch.tensor(rows, dtype=torch.float64), rtol=1e-6, atol=0)


def test_the_clip_does_not_see_what_may_not_move():
    params = {"w": torch.zeros(1, 3, dtype=torch.float64)}
    moves = {"w": torch.tensor([[True, True, False]])}
    grads = {"w": torch.tensor([[0.3, 0.4, 100.0]], dtype=torch.float64)}  # the moving part has norm 0.5
    SGD(grad_clip=1.0).step(params, grads, {}, moves, 1.0)
    assert params["w"].tolist() == [[-0.3, -0.4, 0.0]]


@pytest.mark.parametrize("rule", [SGD(grad_clip=1.0), Adam(grad_clip=1.0)], ids=["sgd", "adam"])
def test_a_parameter_that_is_one_number_can_be_clipped(rule):
    params = {"scale": torch.tensor([1.0, 1.0], dtype=torch.float64)}  # [C]: one number per client
    rule.step(
        params, {"scale": torch.tensor([-4.0, 0.5], dtype=torch.float64)}, rule.init(params), {"scale": None}, 0.1
    )
    first_step = [1.1, 0.95] if isinstance(rule, SGD) else [1.1, 0.9]  # clipped to norm 1; Adam's first step is lr
    torch.testing.assert_close(params["scale"], torch.tensor(first_step, dtype=torch.float64), rtol=1e-6, atol=0)


def test_only_tensors_with_a_gradient_move():
    params = draw(0)
    before = params["b"].clone()
    SGD(weight_decay=1.0).step(params, {"w": torch.ones(3, 2, 4, dtype=torch.float64)}, {}, {"w": None}, 0.1)
    assert torch.equal(params["b"], before)


def test_plain_sgd_has_no_state():
    assert SGD(weight_decay=0.1, grad_clip=1.0).init(draw(0)) == {}


def test_state_has_the_shape_and_type_of_its_parameters():
    params = draw(0)
    assert {n: (t.shape, t.dtype) for n, t in SGD(momentum=0.9).init(params).items()} == {
        f"momentum/{n}": (t.shape, t.dtype) for n, t in params.items()
    }
    state = Adam().init(params)
    assert state["first/personal/w"].shape == state["second/personal/w"].shape == (3, 2, 4)
    assert state["steps/personal/w"].tolist() == [0, 0, 0]


def test_a_recipe_chooses_the_optimiser():
    assert optim.default(Training(momentum=0.9, weight_decay=0.1, grad_clip=2.0)) == SGD(0.9, 0.1, 2.0)
    assert optim.default(Training(optimizer="adam", weight_decay=0.1, grad_clip=2.0)) == Adam(
        weight_decay=0.1, grad_clip=2.0
    )
    assert optim.default(Training(optimizer="adamw", weight_decay=0.1)) == Adam(weight_decay=0.1, decoupled=True)
    for kind in ("sgd", "adam", "adamw"):
        rule = optim.default(Training(optimizer=kind, grad_clip=2.0), joint_clip=True)
        assert rule == dataclasses.replace(optim.default(Training(optimizer=kind, grad_clip=2.0)), joint_clip=True)  # type: ignore[type-var]
