"""What a guest says reaches people only as one printable line."""

from __future__ import annotations

import pytest

from chv.agent.guest_access import banner_line


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
