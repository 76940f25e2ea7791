"""What the host knows of the probe's instructions and patience is what the guest has."""

from __future__ import annotations

import re
from pathlib import Path

from chv import probe
from chv.probe.command import INSTRUCTIONS, NetCheck, NicPlan

SOURCE = Path(probe.__file__).parent / "guest" / "instructions.c"


def test_the_instructions_are_those_of_the_guest_in_its_order() -> None:
    table = re.findall(r'^ *\{"([a-z0-9-]+)",', SOURCE.read_text(), re.MULTILINE)
    assert tuple(table) == INSTRUCTIONS


def test_the_patience_of_a_check_is_told_before_it_and_only_where_it_changes() -> None:
    checks = (
        NetCheck(kind="ping", target="router", timeout_ms=2000),
        NetCheck(kind="dns", target="a.b", timeout_ms=2000),
        NetCheck(kind="ping", target="10.0.0.1", must_fail=True, timeout_ms=500),
        NetCheck(kind="ping", target="10.0.0.2"),
    )
    word = NicPlan(checks=checks).word()
    assert word == "net=timeout=2000,ping:router,dns:a.b,timeout=500,!ping:10.0.0.1,ping:10.0.0.2"
