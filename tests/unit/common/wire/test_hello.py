"""Versions of the protocol that two processes have in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common.wire.hello import Incompatible, check_reply, common_version
from chv.common.wire.types import HelloReply, HelloRequest

VERSIONS = st.lists(st.integers(min_value=1, max_value=9), max_size=5)


@given(VERSIONS, VERSIONS)
def test_the_newest_common_version_is_spoken_or_the_call_refused(
    theirs: list[int], ours: list[int]
) -> None:
    shared = set(theirs) & set(ours)
    request = HelloRequest(versions=theirs, client="agent")
    if shared:
        assert common_version(request, ours) == max(shared)
    else:
        with pytest.raises(Incompatible, match="agent speaks protocol"):
            common_version(request, ours)


def test_a_daemon_of_another_protocol_is_named_with_its_version() -> None:
    reply = HelloReply(
        daemon="stord", version="9.1", protocol=7, instance="abcdef", boot_id="b", pid=1, state=""
    )
    check_reply(reply, (6, 7))
    with pytest.raises(Incompatible, match=r"chv-stord 9\.1 speaks protocol 7, this one 1") as told:
        check_reply(reply, (1,))
    assert told.value.resource == "daemon/stord"
    assert "restart" in told.value.hint
