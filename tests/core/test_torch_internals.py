"""PyTorch without the internals that this package uses: slower, and the same numbers."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import personafl
from personafl.core import torch_internals
from personafl.core.torch_internals import data_version, foreach, has_gradient_hooks, is_hooked, subtract_scaled
from personafl.data.content_hash import content_hash
from personafl.engine.admission import UncheckedNumbers
from personafl.models import StackedModel, forward_cost, patterns

ROOT = Path(personafl.__file__).parent
USED = ("add_", "sub_", "mul", "div", "copy_", "norm", "sub", "add")  # operations on lists of tensors


def missing(*_: Any, **__: Any) -> Any:
    raise AttributeError


def refused(*_: Any, **__: Any) -> Any:
    raise TypeError("got an unexpected keyword argument")


def unknown(_: Tensor) -> int:
    raise AttributeError


@pytest.fixture
def without_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USED:
        monkeypatch.delattr(torch, f"_foreach_{name}")
    monkeypatch.delattr(torch, "_fused_sgd_")
    monkeypatch.setattr(Tensor, "_version", property(unknown), raising=False)


@pytest.mark.parametrize("how", [missing, refused])
@pytest.mark.parametrize(
    ("operation", "others", "options", "expected"),
    [
        ("add_", [[torch.tensor([10.0, 20.0]), torch.tensor(30.0)]], {"alpha": -0.5}, ([-4, -8], -12)),
        ("sub_", [[torch.tensor([10.0, 20.0]), torch.tensor(30.0)]], {}, ([-9, -18], -27)),
        ("mul", [torch.tensor(2.0)], {}, ([2, 4], 6)),
        ("div", [torch.tensor(2.0)], {}, ([0.5, 1], 1.5)),
        ("copy_", [[torch.tensor([10.0, 20.0]), torch.tensor(30.0)]], {}, ([10, 20], 30)),
        ("norm", [math.inf], {}, (2, 3)),
        ("sub", [[torch.tensor([10.0, 20.0]), torch.tensor(30.0)]], {}, ([-9, -18], -27)),
        ("add", [[torch.tensor([10.0, 20.0]), torch.tensor(30.0)]], {"alpha": 0.5}, ([6, 12], 18)),
    ],
)
def test_an_operation_on_a_list_is_done_one_by_one_where_pytorch_has_no_other(
    operation: str,
    others: list[Any],
    options: dict[str, Any],
    expected: tuple[Any, Any],
    how: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert operation in USED
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(torch, f"_foreach_{operation}", how)
        tensors = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
        assert tuple(t.tolist() for t in foreach(operation, tensors, *others, **options)) == expected
        if operation.endswith("_"):
            assert tuple(t.tolist() for t in tensors) == expected


@pytest.mark.parametrize("how", [missing, refused])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_gradient_descent_needs_no_fused_kernel(
    dtype: torch.dtype, how: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(torch, "_fused_sgd_", how)
        params = [torch.tensor([1.0, 2.0])]
        subtract_scaled(params, [torch.tensor([2.0, -4.0])], torch.tensor(0.25, dtype=dtype))
        assert params[0].tolist() == [0.5, 3.0]


def trained() -> dict[str, Tensor]:
    """A client's weights after two rounds of Ditto, which has a proximal term, with an MLP."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(48, 5, generator=draw)
    result = personafl.run(
        data=(x, (x[:, 0] > 0).long(), torch.arange(48) // 12),
        model=nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)),
        algorithms=["ditto"],
        training={"num_rounds": 2, "lr": 0.1},
        device="cpu",
    )
    return dict(result["ditto"].client(0).module.state_dict())


def test_a_run_without_internals_gives_the_same_numbers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    expected = trained()
    request.getfixturevalue("without_internals")
    monkeypatch.setattr(torch_internals, "_MODULE_HOOKS", ("_no_such_hooks",))
    torch.manual_seed(0)
    weights = trained()
    assert weights.keys() == expected.keys() and weights
    for name, t in expected.items():
        torch.testing.assert_close(weights[name], t)


@pytest.mark.usefixtures("without_internals")
def test_without_versions_a_tensor_is_taken_to_have_been_written_to() -> None:
    x = torch.ones(3)
    assert data_version(x) is None
    before = content_hash(x)
    x[0] = 2
    assert content_hash(x) != before
    hopes = UncheckedNumbers()
    hopes.add([x])
    assert not hopes.are_finite()


def test_the_hash_of_an_inference_tensor_is_that_of_its_numbers_now() -> None:
    """Such tensors have no version, and may be written to all the same."""
    with torch.inference_mode():
        x = torch.ones(3)
        before = content_hash(x)
        x[0] = 2
        assert content_hash(x) != before


def test_hooks_that_are_not_known_of_are_taken_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    assert not is_hooked(module) and not is_hooked(module, "forward", "forward_pre")
    del module._forward_hooks
    assert is_hooked(module) and is_hooked(module, "forward") and not is_hooked(module, "forward_pre")


def test_hooks_on_parameters_that_cannot_be_known_of_are_warned_about() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not has_gradient_hooks(parameter)
    parameter.register_hook(lambda grad: 2 * grad)
    assert has_gradient_hooks(parameter)

    class Blind(nn.Parameter):
        _backward_hooks = property(unknown)  # type: ignore[assignment]

    with pytest.warns(UserWarning, match="does not tell whether parameters have hooks; hooks on parameters are ignor"):
        assert not has_gradient_hooks(Blind(torch.ones(2)))


def test_an_operator_that_is_gone_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = torch_internals.aten_operator
    monkeypatch.setattr(forward_cost, "aten_operator", lambda n: None if n == "_trilinear" else operator(n))
    with pytest.warns(UserWarning, match="has no operator _trilinear: FLOP of bilinear layers"):
        forward_cost.observe(nn.Linear(3, 2), torch.ones(1, 3), {"weight", "bias"})
    assert operator("no_such_operator") is None


# Recordings of forward passes

CHAIN = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class SetUp(torch.autograd.Function):
    """The other way to write one: without a context in `forward`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class OfFunction(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.a, self.b = function, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.function(x)).relu())  # type: ignore[no-any-return]


PLAIN_APPLY = torch._C._FunctionBase.__dict__["apply"]  # type: ignore[attr-defined] # what PyTorch 2.14 has for `apply`


@pytest.mark.parametrize("version", ["installed", "2.14"])
@pytest.mark.parametrize("function", [Reversed, SetUp])
@pytest.mark.parametrize("bound", [False, True])
def test_no_autograd_function_is_recorded_however_it_is_called(
    version: str, function: Any, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version == "2.14":
        monkeypatch.setattr(torch.autograd.Function, "apply", PLAIN_APPLY)
    apply = function.apply
    module = OfFunction(apply if bound else lambda x: function.apply(x))
    assert StackedModel(module, torch.rand(2, 3))._fused is None
    assert StackedModel(OfFunction(torch.relu), torch.rand(2, 3))._fused is not None


def test_the_package_is_imported_where_apply_is_no_python_function() -> None:
    code = (
        "import torch; torch.autograd.Function.apply = torch._C._FunctionBase.__dict__['apply']; "
        "import personafl.cli, personafl.models.patterns"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def _checked_anew() -> Any:
    patterns._recordings_can_be_trusted.cache_clear()
    yield
    patterns._recordings_can_be_trusted.cache_clear()


@pytest.mark.usefixtures("_checked_anew")
@pytest.mark.parametrize("what", ["autograd functions", "contexts", "nodes", "code"])
def test_recordings_that_are_not_what_they_must_be_are_not_used(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another version of PyTorch recorded something else: there is a warning, and the model runs unfused."""
    example = torch.rand(2, 3)
    expected = StackedModel(nn.Sequential(*CHAIN), example)
    assert expected._fused is not None
    patterns._recordings_can_be_trusted.cache_clear()
    if what == "autograd functions":
        monkeypatch.setattr(patterns, "_bodies_of_autograd_functions", set)
    elif what == "contexts":
        monkeypatch.setattr(patterns, "_modes", tuple)
    elif what == "nodes":
        monkeypatch.setattr(torch.fx.Tracer, "call_module", missing)
    else:
        monkeypatch.setattr(torch.fx, "GraphModule", missing)
    with pytest.warns(UserWarning, match="models run without fused layers, which is slower"):
        model = StackedModel(nn.Sequential(*CHAIN), example)
    assert model._fused is None and not model.whole
    params = {n: t.expand(2, *t.shape) for n, t in expected.initial.items()}
    x = torch.rand(2, 5, 3)
    torch.testing.assert_close(model(params, x), expected(params, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StackedModel(nn.Sequential(*CHAIN), example)  # it is said once


@pytest.mark.usefixtures("_checked_anew")
def test_recordings_are_trusted_also_without_gradients() -> None:
    with torch.no_grad():
        assert patterns._recordings_can_be_trusted()


# Sources

ELSEWHERE = {
    "_exit": "os",
    "_getframe": "sys",
    "_replace": "named tuples, of which it is public",
    "_processes": "concurrent.futures",
    "_forkserver": "multiprocessing",
    "_forkserver_pid": "multiprocessing",
    "_stop": "multiprocessing",
    "_Unpickler": "pickle, whose unpickler in Python it is; data/unpickle.py says why not the one in C",
}
"""Attributes of other packages than PyTorch whose names begin with an underscore."""


def own_attributes() -> set[str]:
    """Names of methods and fields of the package's classes, and of attributes that they store on `self`."""
    nodes = [node for path in ROOT.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    members = [member for node in nodes if isinstance(node, ast.ClassDef) for member in node.body]
    methods = {member.name for member in members if isinstance(member, ast.FunctionDef)}
    fields = {m.target.id for m in members if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)}
    stored = {ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return methods | fields | {name.removeprefix("self.") for name in stored if name.startswith("self.")}


def test_no_other_file_reads_private_attributes_of_pytorch() -> None:
    """`torch.utils._python_dispatch` alone: PyTorch's manual imports `TorchDispatchMode` from there."""
    known = own_attributes() | ELSEWHERE.keys()
    assert not known & {"_version", "_forward_hooks", "_buffers", "_parameters", "_modules"}
    for path in sorted(ROOT.rglob("*.py")):
        if path.name == "torch_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = ".".join([node.module or "", *(alias.name for alias in node.names)]).split(".")
                private = [name for name in names if name.startswith("_")]
                assert private in ([], ["_python_dispatch"]), f"{path.name}: {names}"
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert node.attr in known, f"{path.name}:{node.lineno}: {ast.unparse(node)}"
