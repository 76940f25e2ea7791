"""How operations and objects are named to people."""

from __future__ import annotations

from typing import Any, cast

import pytest

from chv.cli.operations import final, label
from chv.common.errors import DeadlineExceeded
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire.agent import WAIT_OPERATION, Operation, OperationReply


@pytest.mark.parametrize(
    ("namespace", "named"),
    [("default", "Network/lan"), ("other", "Network/other/lan")],
)
def test_an_object_of_another_tenant_is_told_apart(namespace: str, named: str) -> None:
    assert label("Network", "lan", namespace) == named


class _Busy:
    """An agent whose operation never ends."""

    def call(self, method: object, _request: object, **_options: Any) -> OperationReply:
        if method is WAIT_OPERATION:
            raise DeadlineExceeded("not yet")
        waits = "tries again: device '/dev/sdx' does not exist"
        return OperationReply(
            operation=Operation(
                id="op-1",
                verb="create",
                kind="Volume",
                namespace="default",
                name="v",
                uid="u",
                generation=1,
                requester="cli",
                message=waits,
            )
        )


def test_a_wait_that_is_over_says_what_the_operation_waits_for() -> None:
    with pytest.raises(DeadlineExceeded, match=r"/dev/sdx.*does not exist"):
        final(cast("BlockingClient", _Busy()), "op-1", 0.0)
