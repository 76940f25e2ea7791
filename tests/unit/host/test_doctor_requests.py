"""The doctor tells how many VMs with disks the host's asynchronous requests are enough for."""

from __future__ import annotations

from pathlib import Path

import pytest

from chv.host import doctor, storage_checks


def check(directory: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> doctor.Check:
    (directory / "aio-max-nr").write_text(f"{limit}\n")
    (directory / "aio-nr").write_text("3072\n")
    monkeypatch.setattr(storage_checks, "LIMITS", directory)
    return next(each for each in doctor.run_checks() if each.id == "storage-requests")


def test_the_limit_that_linux_comes_with_is_warned_of_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(tmp_path, 65536, monkeypatch)
    assert found.status == "warning"
    assert "enough for 64 VMs (fs.aio-max-nr=65536, 3072 taken, 1024 for" in found.message
    assert "fs.aio-max-nr=1048576" in found.remedy


def test_what_the_remedy_sets_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(tmp_path, storage_checks.REQUESTS_MAX, monkeypatch)
    assert (found.status, found.remedy) == ("ok", "")
