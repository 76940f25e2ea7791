"""The page of conditions for people, made from the table. Pure.

`python -m chv.agent.condition_page > docs/conditions.md`; a test keeps the file true.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

from chv.agent.condition_table import ERRORS, NODE_CONDITIONS, OVERDUE, TABLE
from chv.agent.condition_words import ConditionRule, KindRule, Passing
from chv.agent.daemons import (
    HEALTH_MISSES_MAX,
    HEALTH_TIMEOUT_S,
    LISTEN_TIMEOUT_S,
    READY_TIMEOUT_S,
)

HEAD = f"""# Conditions

Made by `python -m chv.agent.condition_page`; do not edit.

A condition says one thing, what it rests on (`evidence`), since when it is so
(`lastTransitionTime`) and when that was seen last (`lastProbeTime`). What cannot be seen is
`Unknown`, with the moment when it was known last; it is never taken from what was done last.
`get` and `list` answer from memory with the age of each object; nobody is waited for.

`chv wait KIND/NAME --for TYPE` waits for any of them, `--for TYPE=False`, `--for TYPE=Unknown`,
`--for phase=NAME` and `--for deleted` as well; `chv wait node --for TYPE` for those of the node.

A state that is to pass has a deadline. When it has passed, the condition says
`<state>{OVERDUE}` as its reason, with what it said before as its message, and `chv why` shows it.
Nothing else changes by that: what comes next is in the table. A phase counts from
`status.phaseSince`, also over an end of the agent; a reason counts anew with the agent. "+ T" is
the VM's own `shutdownTimeout`; "progress" counts from the last step forward.

An object whose daemon fails shows the code of the error as its reason:
{fill(", ".join(ERRORS), 100)}.
What may pass is tried again all the time; what is final ends in phase Failed.
"""
NODE_STATES = f"""`chv node status` shows since when each is so, and when that was seen last.

States of the node that are to pass. Bootstrapping ends with the checks of the host: HostReady or
Failed. HostReady and StorageReady wait for a daemon: one that does not listen
{LISTEN_TIMEOUT_S:g} s after its start, or is not ready after {READY_TIMEOUT_S:g} s, is started
anew; one that ends more than 5 times within a minute makes the node Failed. NetworkReady ends when
all workers are judged. Degraded lasts as long as something is missing, and says what; a daemon that
leaves {HEALTH_MISSES_MAX} questions unanswered, each for {HEALTH_TIMEOUT_S:g} s, is started anew.
Draining lasts as long as the deadlines of its VMs; `chv node status` names those that are left.
"""


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(f"\n{_kind(kind, rule)}" for kind, rule in TABLE.items()) + _node()


def _kind(kind: str, rule: KindRule) -> str:
    lines = [f"## {kind}", "", *_conditions(rule.conditions), ""]
    lines += ["| Phase that is to pass | Deadline | Then |", "|---|---|---|"]
    lines += [f"| {name} | {_deadline(each)} | {each.then} |" for name, each in rule.phases.items()]
    rest = f" In {' and '.join(rule.rest)} no reason is to pass." if rule.rest else ""
    lines += ["", f"Phases that may stand: {', '.join(rule.standing)}.{rest}", ""]
    passing = list(_passing(rule.conditions))
    if passing:
        lines += ["| Reason that is to pass | Deadline | Then |", "|---|---|---|", *passing, ""]
    return "\n".join(lines)


def _conditions(rules: tuple[ConditionRule, ...]) -> Iterator[str]:
    yield "| Condition | Evidence | Seen | At most | Reasons that may stand | Unknown |"
    yield "|---|---|---|---|---|---|"
    for rule in rules:
        standing = ", ".join(rule.standing) or "-"
        unknown = "; ".join(f"{reason}: {when}" for reason, when in rule.unknown.items()) or "-"
        old = "-" if rule.stale_s == float("inf") else f"{rule.stale_s:g} s"
        seen = rule.time.value
        yield f"| {rule.type} | {rule.evidence} | {seen} | {old} | {standing} | {unknown} |"


def _passing(rules: tuple[ConditionRule, ...]) -> Iterator[str]:
    for rule in rules:
        for reason, each in rule.passing.items():
            yield f"| {rule.type}: {reason} | {_deadline(each)} | {each.then} |"


def _deadline(rule: Passing) -> str:
    more = " + T" if rule.asks else ""
    return f"{rule.deadline_s:g} s{more}{', progress' if rule.progress else ''}"


def _node() -> str:
    lines = ["\n## Node", "", *_conditions(NODE_CONDITIONS), "", NODE_STATES]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
