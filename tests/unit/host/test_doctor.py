"""The doctor looks and changes nothing; what is missing comes with what to type."""

from __future__ import annotations

import json
import shutil

import pytest

from chv.cli.__main__ import main
from chv.host import doctor


def test_every_check_has_a_distinct_id_and_a_known_status() -> None:
    checks = doctor.run_checks()
    assert len({check.id for check in checks}) == len(checks)
    assert {check.status for check in checks} <= {"ok", "info", "warning", "error"}


def test_every_error_and_warning_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    missing = [check for check in doctor.run_checks() if check.id in doctor.PROGRAMS]
    assert all(check.remedy for check in missing if check.status == "error")
    assert any("apt-get install" in check.remedy for check in missing)


def test_json_has_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"checks"}
    assert all({"id", "status", "message"} <= set(check) for check in found["checks"])


def test_missing_program_makes_the_exit_code_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    assert main(["doctor"]) == 6
    assert "dnsmasq is missing" in capsys.readouterr().out
