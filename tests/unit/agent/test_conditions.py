"""The table of conditions: nothing is shown that it does not know, and the page is made from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import chv.agent
from chv.agent.condition_page import page
from chv.agent.condition_table import ERRORS, NODE_CONDITIONS, OVERDUE, TABLE, base_reason
from chv.agent.node import Predicate
from chv.agent.node_waiting import TYPES as NODE_TYPES
from chv.common.wire.resources import CONDITIONS, KINDS, PHASES
from chv.vmm.driver import VmmState

AGENT = Path(chv.agent.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "conditions.md"
MAKERS = {"condition": 2, "WaitStep": 1}  # function -> where its reason is
# A storage daemon that comes back by itself is told by StorageLost in words of its own.
NEVER_SHOWN = {("StorageLost", "BackendRestarting")}


def said() -> Iterator[tuple[str, str, str]]:
    """Yield where, type and reason of each condition that the agent's code names."""
    for path in sorted(AGENT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            place = MAKERS.get(node.func.id)
            if place is None or len(node.args) <= place:
                continue
            type_, reason = node.args[0], node.args[place]
            for each_type in _texts(type_):
                for each in _texts(reason) or [""]:
                    yield f"{path.name}:{node.lineno}", each_type, each


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    return []


def known(type_: str) -> set[str] | None:
    """Return the reasons of a type, of whatever kind; None where no kind has it."""
    rules = [rule for kind in TABLE.values() for rule in kind.conditions if rule.type == type_]
    return set().union(*(rule.reasons for rule in rules)) if rules else None


def test_every_condition_that_the_code_sets_is_in_the_table() -> None:
    found = list(said())
    assert len(found) > 60
    unknown = []
    for where, type_, reason in found:
        reasons = known(type_)
        if reasons is None:
            unknown.append(f"{where}: condition {type_}")
        elif reason and reason not in reasons and (type_, reason) not in NEVER_SHOWN:
            unknown.append(f"{where}: {type_} with reason {reason}")
    assert unknown == []


def test_the_table_promises_no_reason_that_nothing_says() -> None:
    texts = {
        node.value
        for path in AGENT.rglob("*.py")
        if not path.name.startswith("condition_")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    texts |= {state.value.capitalize() for state in VmmState} | {"Asked", *ERRORS}
    told = {r for kind in TABLE.values() for rule in kind.conditions for r in rule.reasons}
    assert told - texts == set()


def test_the_table_has_exactly_the_kinds_conditions_and_phases_of_the_schema() -> None:
    assert set(TABLE) == set(KINDS)
    for kind, rule in TABLE.items():
        assert tuple(each.type for each in rule.conditions) == CONDITIONS[kind]
        assert sorted((*rule.phases, *rule.standing)) == sorted(PHASES[kind])
        assert rule.leads in CONDITIONS[kind]


def test_the_node_has_the_conditions_that_can_be_waited_for_and_no_others() -> None:
    assert sorted(each.type for each in NODE_CONDITIONS) == sorted(NODE_TYPES)
    assert set(NODE_TYPES) > set(Predicate)
    named = {
        word.value.value
        for path in AGENT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("NodeCondition")
        for word in node.keywords
        if word.arg == "type" and isinstance(word.value, ast.Constant)
    }
    assert len(named) >= 3
    assert named <= set(NODE_TYPES)


def test_a_deadline_is_told_by_a_reason_of_its_own() -> None:
    for rule in TABLE.values():
        for condition in rule.conditions:
            assert not any(reason.endswith(OVERDUE) for reason in condition.reasons)
    assert base_reason("StoppingOverdue") == "Stopping"


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_every_state_that_is_to_pass_has_a_deadline_and_what_follows(kind: str) -> None:
    rules = [*TABLE[kind].phases.values()]
    rules += [each for condition in TABLE[kind].conditions for each in condition.passing.values()]
    assert rules
    assert all(0 < each.deadline_s < 3600 and each.then for each in rules)


def test_the_page_says_what_the_table_says() -> None:
    assert PAGE.read_text() == page(), "python -m chv.agent.condition_page > docs/conditions.md"
