"""What this package uses of PyTorch beyond its public interface, and what it does where a version lacks it.

PyTorch may rename or remove these between versions. Then training takes longer, and numbers stay the same up to
rounding. No other file of the package reads a private attribute of PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def foreach(operation: str, tensors: Sequence[Tensor], *others: Any, **options: Any) -> list[Tensor]:
    """Apply an operation to every tensor of a list, on a GPU in one launch.

    Args:
        operation: The name of a method of tensors, such as `add_`, which PyTorch also has for lists.
        tensors: The tensors it is called on.
        *others: Its further arguments. A list or a tuple has one entry for each tensor, anything else goes to all.
        **options: Its keyword arguments, the same for all tensors.

    Returns:
        The results, one for each tensor.
    """
    try:
        out = getattr(torch, f"_foreach_{operation}")(list(tensors), *others, **options)
    except (AttributeError, TypeError):  # it is not there, or takes other arguments: nothing has been computed
        each = [o if isinstance(o, list | tuple) else [o] * len(tensors) for o in others]
        return [getattr(t, operation)(*(o[i] for o in each), **options) for i, t in enumerate(tensors)]
    return list(tensors) if out is None else list(out)


def subtract_scaled(params: Sequence[Tensor], grads: Sequence[Tensor], rate: Tensor) -> None:
    """Subtract the gradients from the parameters in place, times a rate that is a tensor of one number."""
    if rate.dtype == torch.float32:  # the one type for which the fused kernel takes a rate
        plain = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
        try:
            torch._fused_sgd_(list(params), list(grads), [], lr=rate, is_first_step=False, **plain)  # type: ignore[call-overload]
        except (AttributeError, TypeError):
            pass
        else:
            return
    foreach("sub_", params, foreach("mul", grads, rate))


def data_version(t: Tensor) -> int | None:
    """Return a number that grows whenever a tensor is written to; None if this is not known.

    It is not known for tensors made under `torch.inference_mode`.
    """
    return None if t.is_inference() else getattr(t, "_version", None)


def is_hooked(module: nn.Module, *kinds: str) -> bool:
    """Return whether anybody registered hooks on a module, or on all modules; True if this is not known.

    Args:
        module: The module. Its parts are not looked at.
        *kinds: The kinds of hooks that count, `forward` and `forward_pre` for example. All kinds count by default.
    """
    names = [f"_{kind}_hooks" for kind in kinds] or _MODULE_HOOKS
    everywhere = (getattr(nn.modules.module, f"_global{name}", None) for name in names)
    return any(getattr(module, name, True) for name in names) or any(everywhere)


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that are called before and after the forward pass of a module; none if these are not known."""
    return [*forward_pre_hooks(module), *getattr(module, "_forward_hooks", {}).values()]


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that are called before the forward pass of a module; none if this is not known."""
    return list(getattr(module, "_forward_pre_hooks", {}).values())


def pruned_parameter(hook: Any) -> str:
    """Return the name of the parameter that a hook of `torch.nn.utils.prune` prunes."""
    return str(getattr(hook, "_tensor_name", "weight"))


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if not all(hasattr(parameter, kind) for kind in kinds):
        warnings.warn(
            f"PyTorch {torch.__version__} does not tell whether parameters have hooks; hooks on parameters are ignored",
            stacklevel=2,
        )
    return any(getattr(parameter, kind, None) for kind in kinds)


def aten_operator(name: str) -> Any:
    """Return the operator that PyTorch dispatches under a name, with all of its overloads; None if there is none."""
    return getattr(torch.ops.aten, name, None)
