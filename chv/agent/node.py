"""The node's state machine: one table, one writer, readiness recomputed and never remembered.

`TABLE` is the whole of it; a pair that it does not list raises. `RECOMPUTE` stands for "the
highest state that the predicates allow". What an operator wants is durable (`node_record`) and
followed: an agent that finds it recorded begins in that state. Pure but for the injected clock;
who may do what in which state is in `node_rules`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from chv.agent.node_record import NodeIntent
from chv.common.clock import Clock, timestamp
from chv.common.errors import FailedPrecondition
from chv.common.wire.agent import NodeCondition

TRANSITIONS_MAX = 50


class NodeState(StrEnum):
    """Where a node can be."""

    DISCOVERED = "Discovered"
    BOOTSTRAPPING = "Bootstrapping"
    HOST_READY = "HostReady"
    STORAGE_READY = "StorageReady"
    NETWORK_READY = "NetworkReady"
    TENANT_READY = "TenantReady"
    DEGRADED = "Degraded"
    DRAINING = "Draining"
    MAINTENANCE = "Maintenance"
    FAILED = "Failed"


class NodeEvent(StrEnum):
    """What can happen to a node."""

    BOOTSTRAP = "bootstrap"
    CHECKS_PASSED = "host checks passed"
    CHECKS_FAILED = "host checks failed"
    STORD_READY = "stord ready"
    NWD_READY = "nwd ready"
    ADOPTED = "store healthy, census and adoption done"
    PREDICATE_LOST = "a predicate lost"
    PREDICATE_BACK = "a predicate back"
    DRAIN = "drain"
    DRAINED = "no VM left"
    DRAIN_CANCELLED = "drain cancelled"
    RESUME = "resume"
    FATAL = "restart intensity exceeded or store unreadable"
    RESET = "operator's reset"


class Predicate(StrEnum):
    """What readiness is made of, in the order in which it is reached."""

    HOST = "HostReady"
    STORD = "StorageReady"
    NWD = "NetworkReady"
    STORE = "StoreHealthy"
    ADOPTED = "AdoptionDone"


RECOMPUTE = None
_S, _E = NodeState, NodeEvent
RECORDED = {NodeIntent.DRAIN: _S.DRAINING, NodeIntent.MAINTAIN: _S.MAINTENANCE}
_LOSABLE = (_S.HOST_READY, _S.STORAGE_READY, _S.NETWORK_READY, _S.TENANT_READY)
_UNMOVED = (_S.DISCOVERED, _S.DRAINING, _S.MAINTENANCE, _S.FAILED)
_STANDING = (_S.DISCOVERED, _S.DRAINING, _S.MAINTENANCE)


def _table() -> dict[NodeState, dict[NodeEvent, NodeState | None]]:
    table: dict[NodeState, dict[NodeEvent, NodeState | None]] = {
        _S.DISCOVERED: {_E.BOOTSTRAP: _S.BOOTSTRAPPING},
        _S.BOOTSTRAPPING: {_E.CHECKS_PASSED: _S.HOST_READY, _E.CHECKS_FAILED: _S.FAILED},
        _S.HOST_READY: {_E.STORD_READY: _S.STORAGE_READY},
        _S.STORAGE_READY: {_E.NWD_READY: _S.NETWORK_READY},
        _S.NETWORK_READY: {_E.ADOPTED: _S.TENANT_READY},
        _S.TENANT_READY: {_E.DRAIN: _S.DRAINING},
        _S.DEGRADED: {
            _E.DRAIN: _S.DRAINING,
            _E.PREDICATE_BACK: RECOMPUTE,
            _E.PREDICATE_LOST: _S.DEGRADED,
        },
        _S.DRAINING: {_E.DRAINED: _S.MAINTENANCE, _E.DRAIN_CANCELLED: RECOMPUTE},
        _S.MAINTENANCE: {_E.RESUME: _S.BOOTSTRAPPING},
        _S.FAILED: {_E.RESET: _S.BOOTSTRAPPING},
    }
    for state in _LOSABLE:
        table[state][_E.PREDICATE_LOST] = _S.DEGRADED
    for state in _UNMOVED:
        table[state] |= {_E.PREDICATE_LOST: state, _E.PREDICATE_BACK: state}
    for state in NodeState:
        table[state][_E.FATAL] = _S.FAILED
    return table


TABLE = _table()
LADDER: tuple[tuple[NodeState, tuple[Predicate, ...]], ...] = (
    (_S.TENANT_READY, tuple(Predicate)),
    (_S.NETWORK_READY, (Predicate.HOST, Predicate.STORD, Predicate.NWD)),
    (_S.STORAGE_READY, (Predicate.HOST, Predicate.STORD)),
    (_S.HOST_READY, (Predicate.HOST,)),
)
_CLIMB: dict[NodeState, tuple[Predicate, NodeEvent]] = {
    _S.BOOTSTRAPPING: (Predicate.HOST, _E.CHECKS_PASSED),
    _S.HOST_READY: (Predicate.STORD, _E.STORD_READY),
    _S.STORAGE_READY: (Predicate.NWD, _E.NWD_READY),
    _S.NETWORK_READY: (Predicate.ADOPTED, _E.ADOPTED),
}


class IllegalTransition(Exception):
    """A bug of ours: the table has no such pair."""


def next_state(state: NodeState, event: NodeEvent, held: frozenset[Predicate]) -> NodeState:
    """Return where `event` leads; raises IllegalTransition for a pair that is not listed."""
    row = TABLE[state]
    if event not in row:
        raise IllegalTransition(f"{event} in {state}")
    target = row[event]
    return highest(held) if target is RECOMPUTE else target


def highest(held: frozenset[Predicate]) -> NodeState:
    """Return the highest state whose predicates all hold; Degraded where none does."""
    for state, needed in LADDER:
        if held.issuperset(needed):
            return state
    return NodeState.DEGRADED


@dataclass
class _Fact:
    holds: bool = False
    reason: str = "NotYetObserved"
    message: str = ""
    since: str = ""
    seen_at: str = ""


@dataclass
class Node:
    """The one writer of the node's state. `on_change` is called after each transition."""

    clock: Clock
    on_change: Callable[[NodeState], None] = lambda state: None
    state: NodeState = NodeState.DISCOVERED
    since: str = ""
    transitions: deque[str] = field(default_factory=lambda: deque(maxlen=TRANSITIONS_MAX))
    intent: NodeIntent = NodeIntent.SERVE
    _why: str = ""  # who wants it so
    _facts: dict[Predicate, _Fact] = field(
        default_factory=lambda: {predicate: _Fact() for predicate in Predicate}
    )

    def __post_init__(self) -> None:
        self.since = self.since or timestamp(self.clock.now())

    @property
    def held(self) -> frozenset[Predicate]:
        """The predicates that hold now."""
        return frozenset(predicate for predicate, fact in self._facts.items() if fact.holds)

    def bootstrap(self) -> None:
        """Leave Discovered: to where the record says, else to Bootstrapping."""
        recorded = RECORDED.get(self.intent)
        if recorded is None:
            self._step(NodeEvent.BOOTSTRAP, "agent started")
        else:
            self._enter(recorded, f"as recorded: {self._why}")

    def follow(self, intent: NodeIntent, why: str = "") -> None:
        """Do what is wanted of the node by now. Idempotent; in Failed only a reset leads on."""
        self.intent, self._why = intent, why
        self._obey()

    def allows(self, event: NodeEvent) -> bool:
        """Tell whether an operator's wish makes sense now.

        What is recorded can be taken back as well while the node is on its way there.
        """
        on_its_way = self.intent is not NodeIntent.SERVE and self.state is not _S.FAILED
        taken_back = event in (_E.RESUME, _E.DRAIN_CANCELLED) and self.state not in _STANDING
        return event in TABLE[self.state] or (taken_back and on_its_way)

    def refuse_reset(self) -> None:
        """Raise FailedPrecondition where there is nothing to be reset."""
        if self.state is not NodeState.FAILED:
            raise FailedPrecondition(f"the node is {self.state}, only Failed can be reset")

    def reset(self) -> None:
        """Leave Failed on an operator's word."""
        self.refuse_reset()
        self._step(NodeEvent.RESET, "operator's reset")
        self._climb()
        self._obey()

    def fatal(self, reason: str) -> None:
        """Give up until an operator resets the node."""
        if self.state is not NodeState.FAILED:
            self._step(NodeEvent.FATAL, reason)

    def observe(self, predicate: Predicate, *, holds: bool, reason: str, message: str = "") -> None:
        """Record one predicate as just seen and move accordingly."""
        fact = self._facts[predicate]
        changed = fact.holds != holds
        if changed or not fact.since:
            fact.since = timestamp(self.clock.now())
        fact.holds, fact.reason, fact.message = holds, reason, message
        fact.seen_at = timestamp(self.clock.now())
        if not changed:
            if predicate is Predicate.HOST and not holds and self.state is _S.BOOTSTRAPPING:
                self._step(NodeEvent.CHECKS_FAILED, f"{reason}: {message}")
            return
        if self.state is _S.BOOTSTRAPPING:
            if predicate is Predicate.HOST and not holds:
                self._step(NodeEvent.CHECKS_FAILED, f"{reason}: {message}")
        elif not holds and self._needed(predicate):
            self._step(NodeEvent.PREDICATE_LOST, f"{predicate} lost: {reason}")
        elif holds and self.state is _S.DEGRADED:
            self._step(NodeEvent.PREDICATE_BACK, f"{predicate} back: {reason}")
        self._climb()
        self._obey()

    def confirm(self, predicate: Predicate) -> None:
        """Note that a predicate was just seen to be as it is recorded."""
        self._facts[predicate].seen_at = timestamp(self.clock.now())

    def _obey(self) -> None:
        """Go where the operator wants the node, as far as the table leads there from here."""
        if self.intent is NodeIntent.SERVE:
            if self.state is _S.DRAINING:
                self._step(NodeEvent.DRAIN_CANCELLED, self._why)
            elif self.state is _S.MAINTENANCE:
                # The host may be another by now: its checks lead out of Bootstrapping.
                self._facts[Predicate.HOST] = _Fact()
                self._step(NodeEvent.RESUME, self._why)
            return
        if self.state in (_S.TENANT_READY, _S.DEGRADED):
            self._step(NodeEvent.DRAIN, self._why)
        if self.intent is NodeIntent.MAINTAIN and self.state is _S.DRAINING:
            self._step(NodeEvent.DRAINED, self._why)

    def _needed(self, predicate: Predicate) -> bool:
        """Whether the state rests on the predicate: losing one not yet reached is no loss."""
        for state, needed in LADDER:
            if state is self.state:
                return predicate in needed
        return self.state is _S.DEGRADED or self.state in _UNMOVED

    def _climb(self) -> None:
        while (rung := _CLIMB.get(self.state)) is not None:
            predicate, event = rung
            wanted = {predicate, Predicate.STORE} if event is _E.ADOPTED else {predicate}
            if not self.held.issuperset(wanted):
                return
            self._step(event, self._facts[predicate].reason)

    def _step(self, event: NodeEvent, reason: str) -> None:
        self._enter(next_state(self.state, event, self.held), reason)

    def _enter(self, state: NodeState, reason: str) -> None:
        before, self.state = self.state, state
        if state is before:
            return
        self.since = timestamp(self.clock.now())
        self.transitions.append(f"{self.since} {before} -> {self.state}: {reason}")
        self.on_change(self.state)

    def conditions(self) -> list[NodeCondition]:
        """Return every predicate with its reason and since when it is so."""
        return [
            NodeCondition(
                type=predicate,
                status="True" if fact.holds else "False",
                reason=fact.reason,
                message=fact.message,
                since=fact.since,
                seen_at=fact.seen_at,
            )
            for predicate, fact in self._facts.items()
        ]

    @property
    def why(self) -> str:
        """Return who brought the node here and why, or which predicates are missing."""
        if self.state in RECORDED.values():
            return self._why
        missing = [str(predicate) for predicate in Predicate if predicate not in self.held]
        found = [f"missing: {', '.join(missing)}"] if missing else []
        if self.intent is not NodeIntent.SERVE:
            found.append(f"goes to {RECORDED[self.intent]} {self._why}")
        return "; ".join(found)

    @property
    def serves(self) -> bool:
        """Tell whether VMs may be started."""
        return self.state is _S.TENANT_READY and self.intent is NodeIntent.SERVE
