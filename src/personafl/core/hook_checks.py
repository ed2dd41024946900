"""What an author's hooks return, compared with the model: a name that does not exist would otherwise change nothing.

A name without a slash is a tensor of the model. All else that a method keeps, sends or sums has a prefix
(`personal/fc.weight`, `aux/alpha`), under which anything is possible.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set

import torch
from torch import Tensor

from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.plain_text import list_names
from personafl.core.types import Masked, Params, Payload, Round


def check_method(algorithm: Algorithm) -> None:
    """Refuse a bound method whose sets of names contain some that the model does not have."""
    for hook in ("private", "stays_on_client", "travels"):
        names = getattr(algorithm, hook)()
        if not isinstance(names, Set) or not all(isinstance(n, str) for n in names):
            raise UserError(f"{algorithm.called}.{hook} must return a set of names; it returned {names!r:.80}")
        _check_names(algorithm, hook, names)


def check_initial_server(algorithm: Algorithm, server: Params) -> Params:
    """Return the server's first state, if its tensors of the model are the model's."""
    _check_names(algorithm, "init_server", server)
    _check_shapes(algorithm, "init_server", {n: tuple(t.shape) for n, t in server.items()})
    return server


def check_kept(algorithm: Algorithm, hook: str, kept: Params) -> None:
    """Refuse what clients keep if tensors of it look like the model's and are not."""
    _check_names(algorithm, hook, kept)
    _check_shapes(algorithm, hook, {n: tuple(t.shape[1:]) for n, t in kept.items()})


def check_local_model(algorithm: Algorithm, params: Params) -> None:
    """Refuse a client's model before training that lacks tensors of the model, or has others in their place."""
    _check_names(algorithm, "start", params)
    if missing := [n for n in algorithm.info.shapes if n not in params]:
        raise UserError(
            f"{algorithm.called}.start gave clients a model without {list_names(missing)}. Everything must be in what "
            "the client keeps (init_clients, keep) or in what it receives (init_server, aggregate, download)"
        )
    _check_shapes(algorithm, "start", {n: tuple(t.shape[1:]) for n, t in params.items()})


def check_upload(algorithm: Algorithm, upload: Payload, received: Collection[str]) -> None:
    """Refuse an upload with tensors the model does not have, or with private ones that clients did not receive.

    What was received is shared in this round: LG-FedAvg's features are while it warms up.
    """
    _check_names(algorithm, "upload", upload)
    if upload and (missing := [n for n in algorithm.info.shapes if n in algorithm.travels() and n not in upload]):
        raise UserError(
            f"{algorithm.called}.upload lacks {list_names(missing)}, which {algorithm.called}.travels says are sent"
        )
    if leaving := [n for n in upload if n in algorithm.private() and n not in received]:
        raise UserError(
            f"{algorithm.called}.upload sends {list_names(leaving)}, which {algorithm.called}.private says never leave "
            "the client"
        )


def check_client_model(algorithm: Algorithm, hook: str, params: Params) -> None:
    """Refuse a model to predict with that lacks tensors of the model, or has others in their place."""
    _check_names(algorithm, hook, params)
    _check_shapes(algorithm, hook, {n: tuple(t.shape[1:]) for n, t in params.items()})
    if type(algorithm).answer is not Algorithm.answer or type(algorithm).predict is not Algorithm.predict:
        return  # it may predict with something else
    if missing := [n for n in algorithm.info.shapes if n not in params]:
        raise UserError(f"{algorithm.called}.{hook} gave clients a model without {list_names(missing)}")


def check_moves(method: str, names: Collection[str], params: Collection[str]) -> None:
    """Refuse local work that is to move tensors a client does not have."""
    if unknown := [n for n in names if n not in params]:
        raise UserError(
            f"{method}.turns moves {list_names(unknown)}, which clients do not have. They have {list_names(params, 20)}"
        )


def check_aggregate(algorithm: Algorithm, server: Params, new: Params) -> None:
    """Refuse a new server state whose tensors of the model are others than before, or of another form."""
    if not isinstance(new, Mapping):
        raise UserError(f"{algorithm.called}.aggregate must return the server's new state; it returned {new!r:.80}")
    _check_names(algorithm, "aggregate", new)
    if missing := [n for n in server if n not in new and "/" not in n]:
        raise UserError(f"{algorithm.called}.aggregate returned a state without {list_names(missing)}")
    for n, old in server.items():
        if n in new and (new[n].shape, new[n].dtype) != (old.shape, old.dtype):
            raise UserError(
                f"{algorithm.called}.aggregate returned {n} as {_form(new[n])}; the server holds it as {_form(old)}"
            )


def check_finite_sums(algorithm: Algorithm, upload: Payload, sums: Params, rnd: Round) -> None:
    """Refuse sums that are not finite where uploads are, and far from the largest numbers there are."""
    if broken := _not_finite(sums):
        values = [t.values if isinstance(t, Masked) else t for t in upload.values()]
        if all(map(_moderate, values)):
            raise UserError(_complaint(algorithm, "weigh or summands", broken, rnd, "uploads"))


def check_finite_server(algorithm: Algorithm, server: Params, sums: Params, new: Params, rnd: Round) -> bool:
    """Return whether a new server state is finite; refuse one that is not although all it was made of is.

    Where training diverges, sums or the state grow until they overflow. That is no error of the method. Tensors that
    are not of the model (`aux/best`) and were not finite before may stay so: infinity and NaN can be meant.
    """
    known = placeholders(server)
    broken = [n for n in _not_finite(new) if n not in known]
    given = [*(t for n, t in server.items() if n not in known), *sums.values()]
    if broken and all(map(_moderate, given)):
        raise UserError(_complaint(algorithm, "aggregate", broken, rnd, "sums"))
    return not broken


def placeholders(server: Params) -> frozenset[str]:
    """Return the names of tensors of the server's own, not of the model, that are not finite."""
    return frozenset(_not_finite({n: t for n, t in server.items() if "/" in n}))


def numbers_to_check(server: Params, new: Params, known: Collection[str]) -> list[Tensor]:
    """Return the new state's tensors, with zeros for placeholders that were not finite before; without waiting.

    `known` has the names of all tensors of `server` that may be placeholders.
    """
    return [torch.where(server[n].isfinite().all(), t, 0) if n in known and n in server else t for n, t in new.items()]


def _complaint(algorithm: Algorithm, hooks: str, broken: list[str], rnd: Round, given: str) -> str:
    return (
        f"{algorithm.called}.{hooks} gave numbers that are not finite in round {rnd.number + 1}, for "
        f"{list_names(broken)}, although all {given} of that round are finite"
    )


def _not_finite(tensors: Params) -> list[str]:
    return [n for n, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]


def _moderate(t: Tensor) -> bool:
    """Whether all numbers are finite, and their squares, too."""
    if not t.is_floating_point() or not t.numel():
        return True
    kind = torch.float32 if t.dtype == torch.float64 else t.dtype
    return bool(t.abs().max() < math.sqrt(torch.finfo(kind).max))


def _check_names(algorithm: Algorithm, hook: str, names: Collection[str]) -> None:
    """Refuse names that look like the model's and are not."""
    shapes = algorithm.info.shapes
    if unknown := [n for n in names if "/" not in n and n not in shapes]:
        raise UserError(
            f"{algorithm.called}.{hook}: {list_names(unknown)} matches no tensor of the model. The model has "
            f"{list_names(shapes, 20)}"
        )


def _check_shapes(algorithm: Algorithm, hook: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for n, shape in algorithm.info.shapes.items():
        if n in shapes and shapes[n] != tuple(shape):
            raise UserError(f"{algorithm.called}.{hook}: {n} has shape {shapes[n]}, in the model {tuple(shape)}")


def _form(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}"
