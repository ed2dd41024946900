"""Who takes part in a deployment: nodes that say who they are, and clients whose data fit what was agreed on."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.plain_text import count, list_names
from personafl.core.types import Row
from personafl.data import normalize
from personafl.data.client_files import natural_order
from personafl.data.columns import unite_columns
from personafl.deployment.client_reports import (
    Described,
    answer,
    categories_beyond,
    find_excess,
    labels_beyond,
    one_line,
    read_moments,
)
from personafl.deployment.federation_spec import FORMAT, VERSION, Form, MeanAndStd, World, other_format, read_recipe
from personafl.deployment.messages import Failure, Reply, Request, Transport
from personafl.deployment.roster import Member, Roster
from personafl.deployment.settings import NAME, Deployment
from personafl.deployment.stage_progress import RETRY

log = logging.getLogger("personafl")
HELLO = 120.0  # seconds a node has to say who it is; a round waits for that
HELLO_AGAIN = 1.0  # seconds a node has that did not say it the last time; its answer is looked for every half minute
NAMED = 20  # clients whose names a line of the log has


class Membership:
    """The clients of a deployment and the nodes they are at.

    Args:
        settings: The settings of the deployment.
        recipe: The recipe as TOML.
        transport: Carries messages to nodes.
        clock: Seconds from some moment on.
        on_lost: Called with a client that has lost what it kept.
    """

    def __init__(
        self,
        settings: Deployment,
        recipe: str,
        transport: Transport,
        clock: Callable[[], float],
        on_lost: Callable[[Member], None],
    ) -> None:
        self.settings, self.recipe, self.transport = settings, recipe, transport
        self.clock, self.on_lost = clock, on_lost
        self.experiment = ""
        self.world: World | None = None
        self.roster = Roster(settings.clients)
        self.aside: dict[int, float] = {}  # nodes that cannot be used, and until when
        self.silent: set[int] = set()  # nodes that did not say in time who they are
        self.met: dict[int, str] = {}  # nodes by name, in this process
        self.unused: dict[str, str] = {}  # nodes that cannot be used, and why

    def hello(self) -> dict[int, Row]:
        """Ask nodes that are new who they are: their replies, by node."""
        now = self.clock()
        self.aside = {n: t for n, t in self.aside.items() if t > now}
        online = self.transport.nodes()
        self.met = {n: name for n, name in self.met.items() if n in online}
        self.unused = {n: why for n, why in self.unused.items() if int(n) in online}
        new = [n for n in online if n not in self.met and n not in self.aside]
        if not new:
            return {}
        keys = {n: self.transport.key(n) for n in new}
        bound = {n: {"key": keys[n]} if self.settings.bind and keys[n] != str(n) else {} for n in new}
        asked = {n: Request("hello", {"experiment": self.experiment, **bound[n]}) for n in new}
        found = {}
        replies = self.exchange({n: r for n, r in asked.items() if n not in self.silent}, HELLO)
        replies |= self.exchange({n: r for n, r in asked.items() if n in self.silent}, HELLO_AGAIN)
        self.silent = (self.silent - replies.keys()) & set(online)
        self.silent |= {n for n, reply in replies.items() if isinstance(reply, Failure) and reply.busy}
        for node, reply in replies.items():
            why, told = answer(reply)
            name = str(told.get("client", ""))
            if not why and not NAME.fullmatch(name):
                why = f"its name is {name!r:.80}"
            if not why and (difference := other_format(told)):
                why = f"it has {difference}"
            member = self.roster.named(name)
            other = next((n for n, m in self.met.items() if m == name), None)
            if not why and self.settings.bind:
                why = _about_key(node, keys[node], name, member)
            if not why and other is not None and self.settings.bind:
                why = f"client {name} is here already, as another node"
            if why:
                log.warning("node %d is not used: %s", node, why)
                self.unused[str(node)] = why
                self.aside[node] = self.clock() + RETRY
                continue
            if (version := told.get("version")) != VERSION:
                log.info("client %s runs personafl %s, this is %s", name, one_line(version)[:40], VERSION)
            self.unused.pop(str(node), None)
            self.met = {n: m for n, m in self.met.items() if m != name} | {node: name}
            if member is not None:
                member.node, member.key = node, keys[node]
            found[node] = told
        return found

    def agree(self, wanted: int) -> World | None:
        """Return the world of what the clients that are there tell of their data; None where they are too few.

        The world has no model yet.
        """
        node_of = {name: node for node, name in self.met.items()}
        roster = Roster(self.settings.clients)
        members = roster.add(node_of)
        told = self._described({m.number: (node_of[m.name], m) for m in members})
        if not told:
            return None
        usual = Counter(d.kind for d in told.values()).most_common(1)[0][0]  # what one says does not shut out the rest
        like = next(d for d in told.values() if d.kind == usual)
        held = {n: d for n, d in told.items() if d.kind == usual}
        form = self._common_form([d.form for d in held.values()])
        if (excess := find_excess(held, form)) is not None:
            most, why = excess
            self._set_aside(node_of[members[most].name], members[most], why)
            return None
        for m in members:
            if m.number in told and (why := told[m.number].unlike(like) or labels_beyond(told[m.number].form, form)):
                self._set_aside(node_of[m.name], m, why)
                held.pop(m.number, None)
        normalization = targets = None
        first = members[: self.settings.clients]
        if len(held) == len(members):
            training = {m.number: held[m.number] for m in first}
            normalization = self._normalization(form, training, members, node_of)
            targets = self._target_normalization(form, training, members, node_of)
        if len(held) < len(members) or any(m.name not in self.met.values() for m in members):
            return None  # numbers follow from who is there, so all are told anew
        if len(members) < wanted:
            return None
        self.roster = roster
        for m in members:
            m.node, m.sizes = node_of[m.name], held[m.number].sizes
            m.key = self.transport.key(m.node)
        everybody = len(members) >= self.settings.clients
        examples = sum(m.sizes["train"] for m in first) if everybody else 0
        clients = self.settings.clients
        return World(self.experiment, VERSION, self.recipe, clients, examples, form, normalization, targets)

    def _described(self, clients: Mapping[int, tuple[int, Member]]) -> dict[int, Described]:
        """What these clients tell of their data, by number; those that cannot are set aside."""
        told: Row = {"experiment": self.experiment, "recipe": self.recipe, "version": VERSION, "format": FORMAT}
        told |= {} if self.world is None else {"form": dataclasses.asdict(self.world.form), "world": self.world.told()}
        asked = {node: Request("describe", told | {"number": number}) for number, (node, _) in clients.items()}
        replies, found = self.exchange(asked), {}
        for number, (node, member) in clients.items():
            why, told = answer(replies[node])
            try:
                if not why:
                    found[number] = Described.read(told)
            except (UserError, KeyError, TypeError, ValueError):
                why = "what it tells of its data cannot be understood"
            if why:
                self._set_aside(node, member, why)
        return found

    def _set_aside(self, node: int, member: Member, why: str) -> None:
        log.warning("client %s is not used: %s", member.name, why)
        self.unused[str(node)] = why
        self.aside[node] = self.clock() + RETRY
        self.met.pop(node, None)

    def _common_form(self, forms: Sequence[Form]) -> Form:
        """The form of all, with the classes and the categories of all."""
        first, given = forms[0], self.settings.labels
        if tables := [f.columns for f in forms if f.columns is not None]:
            first = first.with_columns(unite_columns(tables))
        if first.class_names is None:
            return dataclasses.replace(first, classes=len(given) or max(f.classes for f in forms))
        names = given or tuple(sorted({n for f in forms for n in f.class_names or ()}))
        return dataclasses.replace(first, classes=len(names), class_names=names)

    def _normalization(
        self, form: Form, told: Mapping[int, Described], members: Sequence[Member], node_of: Mapping[str, int]
    ) -> MeanAndStd | None:
        """What inputs are normalised by; clients whose sums cannot be used are set aside."""
        setting = next(iter(told.values())).setting
        if setting == "none":
            return None
        if setting == "half":
            return normalize.HALF
        if not isinstance(setting, str):
            return setting
        two = form.stand_in(None).x
        sums = {n: functools.partial(d.input_moments, form, two) for n, d in told.items()}
        return self._standardization(sums, two, members, node_of)

    def _target_normalization(
        self, form: Form, told: Mapping[int, Described], members: Sequence[Member], node_of: Mapping[str, int]
    ) -> MeanAndStd | None:
        """What targets are normalised by; clients whose sums cannot be used are set aside."""
        if not normalize.normalizes_targets(read_recipe(self.recipe).data.normalize_targets, form.task):
            return None
        two = form.stand_in(None).y
        sums = {n: functools.partial(read_moments, d.target_moments, two, d.sizes["train"]) for n, d in told.items()}
        return self._standardization(sums, two, members, node_of)

    def _standardization(
        self,
        sums: Mapping[int, Callable[[], normalize.Moments]],
        two: Tensor,
        members: Sequence[Member],
        node_of: Mapping[str, int],
    ) -> MeanAndStd | None:
        """Mean and deviation of all, from readers of each client's sums; `two` are made-up examples or targets."""
        each = []
        for n, read in sums.items():
            try:
                each.append(read())
            except (KeyError, TypeError, ValueError, OverflowError):
                self._set_aside(node_of[members[n].name], members[n], "sums of its data that cannot be")
        if len(each) < len(sums):
            return None
        made = normalize.standardization(each, two)
        return made.mean, made.std

    def meet(self) -> None:
        """Take note of clients that came, or came back, since the last stage."""
        assert self.world is not None
        new = self.hello()
        strangers = sorted((self.met[n] for n in new if self.roster.named(self.met[n]) is None), key=natural_order)
        back: dict[int, tuple[int, Member]] = {}
        for node, told in new.items():
            if member := self.roster.named(self.met[node]):
                there = told.get("stages")
                if member.acknowledged >= 0 and not (isinstance(there, list) and member.acknowledged in there):
                    self.on_lost(member)
                back[member.number] = node, member
        if names := [m.name for m in self._admitted(back)]:
            log.info("back: %s", list_names(names, NAMED))
        while strangers:  # a number is given for good, so to none that cannot be used
            node_of = {name: node for node, name in self.met.items()}
            begin = len(self.roster.members)
            trial = [
                Member(name, begin + i, node_of[name], self.transport.key(node_of[name]))
                for i, name in enumerate(strangers)
            ]
            if len(self._admitted({m.number: (m.node, m) for m in trial})) == len(trial):
                self.roster.members += trial
                for m in trial:
                    log.info("client %s is there, number %d", m.name, m.number)
                break
            strangers = [name for name in strangers if name in self.met.values()]

    def _admitted(self, clients: Mapping[int, tuple[int, Member]]) -> list[Member]:
        """Those of these clients whose data are what was agreed on; the others are set aside."""
        assert self.world is not None
        found = []
        for number, told in self._described(clients).items():
            node, member = clients[number]
            agreed = self.world.form
            why = told.form.unlike(agreed) or labels_beyond(told.form, agreed) or categories_beyond(told.form, agreed)
            if why:
                self._set_aside(node, member, why)
                continue
            member.sizes = told.sizes
            found.append(member)
        return found

    def present(self, ids: Iterable[int]) -> list[int]:
        """Those of these clients that are there and can be used, in their order."""
        return [m.number for m in self.online(ids)]

    def name(self, number: int) -> str:
        member = self.roster.numbered(number)
        return str(number) if member is None else member.name

    def about_missing(self, ids: Sequence[int]) -> str:
        """A sentence on clients that cannot be asked."""
        known = sorted(n for n in ids if self.roster.numbered(n) is not None)
        names = [self.name(n) for n in known]
        refused = {self.refusal(n) for n in known}
        strangers = len(ids) - len(known)
        never = f"{count(strangers, 'client')} {'has' if strangers == 1 else 'have'} never come" if strangers else ""
        if known and not never and len(refused) == 1 and (why := refused.pop()):
            who = f"Client {names[0]}" if len(known) == 1 else f"Each of {list_names(names, NAMED)}"
            return f"{who} is refused: {why}."
        missing = list_names([self._with_reason(n, self.refusal(n)) for n in known], NAMED)
        return " ".join(f"{part}." for part in (missing and f"Missing: {missing}", never) if part)

    def reasons(self, reasons: Mapping[int, str], *, alike: bool = True) -> str:
        """A sentence on clients and the reason of each; of one for all where that may be said and is so."""
        if not reasons:
            return ""
        if alike and len(reasons) > 1 and len(set(reasons.values())) == 1:
            return f"All {len(reasons)} clients fail alike: {next(iter(reasons.values()))}."
        return f"Without one: {list_names([self._with_reason(n, why) for n, why in reasons.items()], NAMED)}."

    def refusal(self, number: int) -> str:
        """Why a client is not used, where that is known."""
        member = self.roster.numbered(number)
        return "" if member is None else self.unused.get(str(member.node), "")

    def _with_reason(self, number: int, why: str) -> str:
        return f"{self.name(number)} ({why})" if why else self.name(number)

    def online(self, ids: Iterable[int]) -> list[Member]:
        """The members of these numbers whose nodes are there, in their order."""
        nodes = set(self.transport.nodes())
        members = [self.roster.numbered(n) for n in ids]
        return [m for m in members if m is not None and m.node in nodes and self.met.get(m.node) == m.name]

    def exchange(self, requests: Mapping[int, Request], most: float = math.inf) -> dict[int, Reply | Failure]:
        timeout = min(self.settings.round_timeout, most)
        return self.transport.exchange(requests, timeout) if requests else {}


def _about_key(node: int, key: str, name: str, member: Member | None) -> str:
    """Why a node may not be the client it says it is; nothing where it may."""
    if key == str(node):  # without keys, a name belongs to the node that first had it
        taken = member is not None and member.key not in ("", key)
        return f"client {name} is bound to another key than that of this node" if taken else ""
    if key == name:
        return ""
    if not key:
        return f"it calls itself {name}, and its key is not in the server's keys/; keys/{name}.pub has to be"
    return (
        f"its key is keys/{key}.pub, so it can only be client {key}, and it calls itself {name}; set "
        f'id = "{key}" in its client.toml, or deployment.bind = false'
    )
