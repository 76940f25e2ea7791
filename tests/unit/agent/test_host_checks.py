"""Checks of the machine: what keeps a node down, and what only degrades it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from chv.agent import __main__ as agent_main
from chv.agent import host_checks
from chv.agent.node import NodeState, Predicate
from chv.agent.node_gate import NodeGate
from chv.common.config import Config
from chv.common.layout import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(instance="abc123", run_root=tmp_path / "run", state_root=tmp_path / "state")
    made.state.mkdir(parents=True)
    return made


def full(path: Path) -> int:
    return 0


def agent_of(layout: Layout) -> agent_main.Agent:
    config = Config()
    node = msgspec.structs.replace(config.node, instance=layout.instance)
    return agent_main.Agent(Path("chv.toml"), msgspec.structs.replace(config, node=node), layout)


async def test_full_disk_degrades_a_node_that_comes_up_and_does_not_fail_it(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "failures", lambda config: [])
    monkeypatch.setattr(host_checks, "free_bytes", full)
    agent = agent_of(layout)
    agent.node.bootstrap()
    await agent.check_host()
    states = [agent.node.state]
    await agent.check_host()
    states.append(agent.node.state)
    assert states == [NodeState.HOST_READY, NodeState.DEGRADED]
    NodeGate(agent.node).check("delete")  # what makes room is allowed


async def test_space_that_returns_brings_the_node_back(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "failures", lambda config: [])
    agent = agent_of(layout)
    agent.node.bootstrap()
    await agent.check_host()
    with monkeypatch.context() as short:
        short.setattr(host_checks, "free_bytes", full)
        await agent.check_host()
    assert Predicate.HOST not in agent.node.held
    await agent.check_host()
    assert agent.node.state is NodeState.HOST_READY


async def test_missing_program_fails_the_bootstrap(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "failures", lambda config: ["dnsmasq is missing"])
    agent = agent_of(layout)
    agent.node.bootstrap()
    await agent.check_host()
    assert agent.node.state is NodeState.FAILED
