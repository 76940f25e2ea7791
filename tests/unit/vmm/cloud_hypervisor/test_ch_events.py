"""The file of events: what it amounts to, cut records, marks of ours, space given back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common.errors import FailedPrecondition, OutcomeUnknown, Unavailable
from chv.vmm.cloud_hypervisor import events, journal
from chv.vmm.cloud_hypervisor.events import History
from chv.vmm.cloud_hypervisor.journal import Journal


def record(name: str, properties: dict[str, str] | None = None) -> bytes:
    """As the VMM writes it."""
    source, event = name.split("/")
    stamp = {"secs": 1, "nanos": 2}
    text = {"timestamp": stamp, "source": source, "event": event, "properties": properties}
    return json.dumps(text, indent=2).encode() + b"\n\n"


def history(*names: str) -> History:
    made = History()
    for name in names:
        data = events.mark(name[4:]) if name.startswith("chv/") else record(name)
        for event in events.parse(data):
            made.fold(event)
    return made


UP = ("vm/booting", "vm/booted")


@pytest.mark.parametrize(
    ("names", "off"),
    [
        ((*UP, "vm/shutdown"), True),
        ((*UP, "chv/stop", "vm/shutdown"), False),
        ((*UP, "chv/stop", "chv/reset", "vm/shutdown"), False),  # told of late
        ((*UP, "chv/stop", "chv/undone", "vm/shutdown"), True),
        ((*UP, "vm/shutdown", "chv/reset"), False),
        ((*UP, "vm/shutdown", *UP), False),
        ((*UP, "chv/stop", "vm/shutdown", *UP, "vm/shutdown"), True),
        (("vm/restored", "vm/shutdown"), True),
    ],
)
def test_a_power_off_is_the_guests_unless_we_asked_for_it(
    names: tuple[str, ...], off: bool
) -> None:
    assert history(*names).guest_off is off


def test_reboots_are_the_guests_unless_we_asked_for_them() -> None:
    reboot = ("vm/rebooting", "vm/rebooted")
    assert history(*UP, *reboot, "chv/reboot", *reboot, *reboot).reboots == 2


def test_a_boot_that_did_not_end_is_known_until_the_vm_is_made_anew() -> None:
    assert history("vm/booting").boot_begun
    assert not history(*UP).boot_begun
    assert history(*UP, "vm/rebooting").boot_begun
    assert not history("vm/booting", "chv/making").boot_begun


def test_a_panic_lasts_until_the_next_boot() -> None:
    assert history(*UP, "guest/panic").panicked
    assert not history(*UP, "guest/panic", "chv/reboot", "vm/rebooting").panicked


def test_a_vm_is_made_between_its_mark_and_its_end() -> None:
    assert history("chv/making", "chv/made").made
    assert not history("chv/making").made
    assert not history("chv/made", "vm/deleted").made


def test_a_record_cut_short_costs_itself_alone() -> None:
    whole = record("vm/booting") + record("vm/booted") + record("guest/panic")
    cut = record("vm/booting")[:40]
    for damaged in (cut + record("vm/booted"), cut + b"\n\n" + record("vm/booted")):
        assert [event.name for event in events.parse(damaged)] == ["vm/booted"]
    assert [event.name for event in events.parse(b"\0" * 100 + whole)][-1] == "guest/panic"
    assert [e.name for e in events.parse(cut + events.mark("stop"))] == ["chv/stop"]


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    for event in events.parse(data):
        History().fold(event)


def test_a_mark_between_a_record_and_its_end_harms_neither() -> None:
    split = record("vm/booted").removesuffix(b"\n\n") + events.mark("stop") + b"\n\n"
    assert [event.name for event in events.parse(split)] == ["vm/booted", "chv/stop"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "events.log"
    made.touch()
    return made


def append(path: Path, *data: bytes) -> None:
    with path.open("ab") as file:
        for part in data:
            file.write(part)


def test_only_whole_records_are_taken_and_the_rest_when_it_comes(path: Path) -> None:
    log = Journal(path)
    text = record("vm/rebooting")
    append(path, text[:30])
    assert log.read().reboots == 0
    append(path, text[30:])
    assert log.read().reboots == 1
    assert log.read().reboots == 1


def test_the_file_of_another_vmm_is_read_from_its_beginning(path: Path) -> None:
    log = Journal(path)
    append(path, record("vm/rebooting"), record("vm/rebooting"))
    assert log.read().reboots == 2
    path.write_bytes(record("vm/rebooting"))  # truncated at the next start
    assert log.read().reboots == 1


def test_what_was_read_is_given_back_and_a_newcomer_knows_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "KEPT_BYTES_MAX", 8192)
    log = Journal(path)
    log.mark("made", {"memory_max_bytes": 5})
    for _ in range(2000):
        append(path, record("vm/rebooting"), record("vm/rebooted"))
        log.read()
    assert path.stat().st_size > 400_000
    assert path.stat().st_blocks * 512 < 32_768
    seen = Journal(path).read()
    assert (seen.reboots, seen.made, seen.limits) == (2000, True, {"memory_max_bytes": 5})


def test_what_comes_while_a_summary_is_written_is_not_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "KEPT_BYTES_MAX", 1000)
    log = Journal(path)
    append(path, record("vm/rebooting") * 10)
    mark = log.mark

    def late(event: str, properties: dict[str, object] | None = None) -> None:
        append(path, record("vm/rebooting"))  # after it was read, before the summary
        mark(event, properties)

    monkeypatch.setattr(log, "mark", late)
    assert log.read().reboots == 10
    assert Journal(path).read().reboots == 11
    assert log.read().reboots == 11


def test_an_announcement_is_taken_back_where_it_was_refused_and_kept_in_doubt(path: Path) -> None:
    log = Journal(path)
    with pytest.raises(FailedPrecondition), log.announced("stop"):
        raise FailedPrecondition("no")
    assert log.read().stops_due == 0
    with pytest.raises(OutcomeUnknown), log.announced("stop"):
        raise OutcomeUnknown("who knows")
    assert log.read().stops_due == 1


def test_a_file_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        Journal(tmp_path / "none").read()
