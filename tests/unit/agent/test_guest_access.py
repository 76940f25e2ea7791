"""What a guest says reaches people only as one printable line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chv.agent.guest_access import GuestProbe, banner_line
from chv.agent.links import DaemonLink
from chv.common.errors import ChvError, DeadlineExceeded, OutcomeUnknown, Unavailable
from chv.common.layout import Layout
from chv.common.rpc import Method
from chv.common.wire.nwd import GUEST


@pytest.mark.parametrize(
    ("received", "line"),
    [
        (b"SSH-2.0-dropbear\r\n\x00\x01\x07key exchange", "SSH-2.0-dropbear"),
        (b"SSH-2.0-x\n", "SSH-2.0-x"),
        (b"SSH-2.0-\x1b]0;owned\x07\x9b2J\r\n", "SSH-2.0-?]0;owned?\ufffd2J"),
        (b"SSH-2.0-cut", "SSH-2.0-cut"),
    ],
)
def test_only_the_identification_line_is_kept_and_no_control_character(
    received: bytes, line: str
) -> None:
    assert banner_line(received) == line


class Refusing(DaemonLink):
    """A daemon that answers every call with one error."""

    def __init__(self, error: ChvError) -> None:
        super().__init__("nwd")
        self._error = error

    async def call_fds(self, method: Method[Any, Any], params: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Unavailable("Connection refused", resource=f"{GUEST}10.9.0.2:22"), Unavailable),
        (DeadlineExceeded("no answer", resource=f"{GUEST}10.9.0.2:22"), DeadlineExceeded),
        (Unavailable("chv-nwd is not ready", resource="daemon/nwd"), OutcomeUnknown),
        (DeadlineExceeded("no reply within 5 s"), OutcomeUnknown),
    ],
)
async def test_a_silent_network_daemon_says_nothing_about_the_guest(
    tmp_path: Path, answer: ChvError, told: type[ChvError]
) -> None:
    probe = GuestProbe(Refusing(answer), Layout("aaaaaa", tmp_path / "run", tmp_path / "state"))
    with pytest.raises(told):
        await probe.probe_ssh("6f1b2c3d-0000-4000-8000-000000000001", 22)
