"""Error bodies of every version, and what becomes of them."""

from __future__ import annotations

import pytest

from chv.common.errors import (
    ChvError,
    Conflict,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unavailable,
)
from chv.vmm.cloud_hypervisor.http import PROTOCOL_SERVER, Response
from chv.vmm.cloud_hypervisor.refusals import Busy, NoRoute, NoVm, Refused, messages, refusal

KERNEL = (
    b'["Error from API","The VM could not boot","Cannot open kernel file",'
    b'"No such file or directory (os error 2)"]'
)
TRACED = (
    b'["Error from API","Error taking a snapshot\\n\\nCaused by:\\n    EINVAL\\n\\n'
    b'Stack backtrace:\\n   0: vm_migration::x\\n             at a.rs:1:2\\n   1: main"]'
)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'["a","b"]', ("a", "b")),
        (b'{ "error": "Invalid header.\nDropped." }', ("Invalid header. Dropped.",)),
        (b"VmNotCreated", ("VmNotCreated",)),
        (b"", ()),
        (b"\xff", ("\ufffd",)),
        (b'"text"', ("text",)),
        (b"[1, null]", ("1", "None")),
        (b"[" * 100_000, ("[" * 100_000,)),
        (TRACED, ("Error from API", "Error taking a snapshot Caused by: EINVAL")),
    ],
)
def test_every_shape_of_body_is_read(body: bytes, said: tuple[str, ...]) -> None:
    assert messages(body) == said


def test_the_root_cause_comes_first_and_what_it_spoilt_after_it() -> None:
    error = refusal("vm.boot", Response(500, "", KERNEL))
    assert isinstance(error, Refused)
    cause = "No such file or directory (os error 2) (Cannot open kernel file)"
    assert error.message == f"Cloud Hypervisor refuses vm.boot: {cause}"
    assert error.chain[0] == "Error from API"


@pytest.mark.parametrize(
    ("status", "server", "body", "kind"),
    [
        (404, "", b'["Not Found"]', NoRoute),
        (404, "", b'["Error from API","VM is not created"]', NoVm),
        (400, "", b'["Bad Request"]', InvalidArgument),
        (400, PROTOCOL_SERVER, b'{ "error": "x\ny" }', Internal),
        (409, "", b'["in use"]', Conflict),
        (429, "", b'["pending"]', Busy),
        (503, PROTOCOL_SERVER, b'{ "error": "Too many open connections" }', Unavailable),
        (500, "", b'["Error from API","VM is not running"]', FailedPrecondition),
    ],
)
def test_a_refusal_is_told_by_its_status(
    status: int, server: str, body: bytes, kind: type[ChvError]
) -> None:
    assert type(refusal("vm.x", Response(status, server, body))) in (kind, Refused)
    assert isinstance(refusal("vm.x", Response(status, server, body)), kind)


def test_a_long_message_is_cut_in_the_error_and_whole_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = refusal("vm.boot", Response(500, "", b'["' + b"x" * 5000 + b'"]'))
    assert len(error.message) < 500
    assert "x" * 5000 in str(caplog.records[-1].__dict__)
