"""Every call that changes something says who and why, has a key, and is an operation."""

from __future__ import annotations

import pytest

from chv.agent.requesters import NAME_MAX, stamped, vouched
from chv.common.rpc import Method
from chv.common.rpc.channel import Peer
from chv.common.wire import agent as api
from chv.common.wire.agent_methods import AGENT_METHODS

# What is no operation, and why.
NONE = {
    "OpenUpload": "a pipe of this connection: nothing is stored before FinishUpload, which is one",
}
# Whose operation is of something else than of the call.
BY_ANOTHER = {
    "CancelOperation": "is recorded on the operation that it ends",
    "Apply": "one operation for each object that it changes",
    "Rollback": "is an apply",
}
MUTATING = [method for method in AGENT_METHODS if method.mutating]


@pytest.mark.parametrize("method", MUTATING, ids=lambda method: method.name)
def test_a_call_that_changes_something_says_who_and_why_and_has_a_key(
    method: Method[api.Apply, api.ApplyReply],
) -> None:
    if method.name in NONE:
        pytest.skip(NONE[method.name])
    fields = set(method.params.__struct_fields__)
    assert {"requester", "reason", "idempotency_key"} <= fields


@pytest.mark.parametrize("method", MUTATING, ids=lambda method: method.name)
def test_its_reply_leads_to_the_operation(method: Method[api.Apply, api.ApplyReply]) -> None:
    if method.name in NONE or method.name in BY_ANOTHER:
        pytest.skip((NONE | BY_ANOTHER)[method.name])
    fields = set(method.result.__struct_fields__)
    assert fields & {"operation", "operation_id"} or method.name in SHORT


# Done when they answer; `chv ops ls` shows them.
SHORT = {"PutKey", "DeleteKey", "CollectImages"}


@pytest.mark.parametrize(
    ("claimed", "recorded"),
    [
        ("cli:ann(uid=1000)", "cli:ann(uid=1000)"),
        ("cli:root(uid=0)", "cli:root(uid=1000)"),
        ("system", "system(uid=1000)"),
        ("", "unnamed(uid=1000)"),
        ("x(uid=0)(UID = 0", "x(uid=1000)"),
        ("a\nb\x1b[31m", "ab[31m(uid=1000)"),
    ],
)
def test_nobody_asks_in_another_uids_name(claimed: str, recorded: str) -> None:
    assert vouched(claimed, 1000) == recorded


def test_a_long_name_leaves_room_for_the_uid() -> None:
    assert vouched("a" * 256, 2**32 - 2) == "a" * NAME_MAX + "(uid=4294967294)"


def test_what_has_no_requester_passes_as_it_is() -> None:
    peer = Peer(pid=1, uid=7, gid=7)
    request = api.ObjectRef(kind="Volume", name="data")
    assert stamped(request, peer) is request
    asked = api.ResetNode(requester="cli:root(uid=0)")
    assert stamped(asked, peer).requester == "cli:root(uid=7)"
