"""A restore of several volumes begins only where none of them would refuse it."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec
import pytest

from chv.cli import connect
from chv.cli.commands import snapshot
from chv.common.errors import FailedPrecondition
from chv.common.wire import agent

OBJECTS: dict[tuple[str, str], dict[str, Any]] = {
    ("VolumeSnapshot", "before"): {"volumes": [{"volume": "first"}, {"volume": "second"}]},
    ("Volume", "first"): {"snapshots": [{"snapshot": "before"}]},
    ("Volume", "second"): {"snapshots": [{"snapshot": "before"}, {"snapshot": "after"}]},
}


class _Agent:
    """Answers what an object's status is and takes nothing else."""

    def __enter__(self) -> _Agent:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def call(self, method: object, request: agent.ObjectRef) -> agent.ObjectReply:
        assert method is agent.GET, "nothing was to be restored"
        text = json.dumps({"status": OBJECTS[request.kind, request.name]})
        return agent.ObjectReply(object=msgspec.Raw(text.encode()))


def test_one_later_snapshot_keeps_all_volumes_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect, "client", lambda _socket: _Agent())
    arguments = argparse.Namespace(
        name="before", namespace="default", volume="", socket=None, reason="", timeout="1s"
    )
    with pytest.raises(FailedPrecondition, match="second has later snapshots: after"):
        snapshot.restore(arguments)
