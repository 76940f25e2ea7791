"""The table of verbs: complete, and what the design says in every state and connectivity."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.agent.apply_verbs import verbs_of
from chv.agent.node import NodeState
from chv.agent.node_record import Hold
from chv.agent.node_rules import RULES, Asked, Standing, refusal
from chv.agent.records import StoredObject
from chv.common.wire.agent import VmVerb, VolumeVerb
from chv.common.wire.manifest import parse
from tests.sim.bench import bare, network

SERVING = {"create", "clone", "migrate_in", "restore", "rebuild", "define", "update"}
RUNNING = {"start", "restart", "attach", "resize", "grow_now"}
BRINGING = {"create", "clone", "migrate_in"}
STATES = st.sampled_from(list(NodeState))
VERBS = st.sampled_from(sorted(RULES))
PAUSED = Hold(requester="ann", reason="slow disk")


def admits(verb: str, state: NodeState, **more: Any) -> bool:
    node = {key: more.pop(key) for key in ("paused", "connected") if key in more}
    return refusal(Asked(verb, **more), Standing(state, **node)) is None


def test_every_verb_of_the_wire_is_in_the_table() -> None:
    assert {verb.value for verb in (*VmVerb, *VolumeVerb)} <= set(RULES)


@given(VERBS, STATES)
def test_verb_is_admitted_where_the_design_says(verb: str, state: NodeState) -> None:
    if verb in SERVING | RUNNING:
        assert admits(verb, state) == (state is NodeState.TENANT_READY)
    else:
        assert admits(verb, state) == (state is not NodeState.FAILED)


@given(VERBS, STATES, st.booleans(), st.sampled_from(["", "ann"]))
def test_cut_off_from_its_control_plane_it_takes_no_new_desired_state(
    verb: str, state: NodeState, desired: bool, forced_by: str
) -> None:
    cut_off = admits(verb, state, connected=False, desired=desired, forced_by=forced_by)
    if verb in SERVING:
        assert not cut_off
    elif verb in RUNNING:
        assert cut_off == (admits(verb, state) and desired)
    elif verb == "delete":
        assert cut_off == (admits(verb, state) and (desired or bool(forced_by)))
    else:
        assert cut_off == admits(verb, state)


@given(VERBS, STATES)
def test_paused_scheduling_keeps_away_what_brings_a_vm_and_nothing_else(
    verb: str, state: NodeState
) -> None:
    paused = admits(verb, state, paused=PAUSED)
    assert paused == (admits(verb, state) and verb not in BRINGING)


@pytest.mark.parametrize(
    ("state", "command"),
    [
        (NodeState.DRAINING, "chv node drain --cancel"),
        (NodeState.MAINTENANCE, "chv node resume"),
        (NodeState.FAILED, "chv node reset"),
        (NodeState.DEGRADED, "chv node status"),
    ],
)
def test_refusal_names_state_reason_and_the_command_that_helps(
    state: NodeState, command: str
) -> None:
    error = refusal(Asked("create"), Standing(state, "by ann: fans"))
    assert error is not None
    assert str(state) in error.message and "by ann: fans" in error.message
    assert command in error.hint


# --- what an apply amounts to


def stored(manifest: dict[str, Any]) -> StoredObject:
    return StoredObject(resource=parse(msgspec.Raw(msgspec.json.encode(manifest))))


def vm(**spec: Any) -> dict[str, Any]:
    made = bare("web")
    return {**made, "spec": {**made["spec"], **spec}}


DISK, OTHER = {"name": "a", "volume": "a"}, {"name": "b", "volume": "b"}
NIC = {"name": "eth0", "network": "lan"}


@pytest.mark.parametrize(
    ("before", "after", "verbs"),
    [
        ({}, {}, set()),
        ({}, {"runStrategy": "Halted"}, {"stop"}),
        ({"runStrategy": "Halted"}, {"runStrategy": "Always"}, {"start"}),
        ({"runStrategy": "Always"}, {"runStrategy": "RerunOnFailure"}, {"update"}),
        ({"disks": [DISK]}, {"disks": [DISK, OTHER]}, {"attach"}),
        ({"disks": [DISK, OTHER]}, {"disks": [OTHER]}, {"detach"}),
        ({"disks": [DISK]}, {"disks": [OTHER]}, {"attach", "detach"}),
        ({"disks": [DISK, OTHER]}, {"disks": [OTHER, DISK]}, {"update"}),
        ({"interfaces": [NIC]}, {"interfaces": []}, {"detach"}),
        ({}, {"cpus": 2}, {"resize"}),
        ({}, {"memory": "512Mi"}, {"resize"}),
        ({}, {"guestPorts": [22, 80]}, {"update"}),
        ({}, {"cpus": 2, "runStrategy": "Halted"}, {"resize", "stop"}),
    ],
)
def test_change_of_a_vm_is_the_verb_that_does_the_same(
    before: dict[str, Any], after: dict[str, Any], verbs: set[str]
) -> None:
    assert verbs_of(stored(vm(**before)), stored(vm(**after)).resource) == verbs


def test_new_object_is_created_defined_or_a_snapshot() -> None:
    snapshot = {**bare("snap"), "kind": "VolumeSnapshot", "spec": {"volume": "disk"}}
    assert verbs_of(None, stored(vm()).resource) == {"create"}
    assert verbs_of(None, stored(network()).resource) == {"define"}
    assert verbs_of(None, stored(snapshot).resource) == {"snapshot"}
