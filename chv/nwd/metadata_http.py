"""Just enough HTTP/1.1 for a guest to ask for its metadata. Sans-I/O: bytes in, bytes out.

One request a connection, without a body, in a head of a bounded size. What is not plainly right is
refused: line ends that are not CRLF, folded headers, two hosts, a length. A request that passed a
proxy (X-Forwarded-For) or that names another host than ours is refused too: such a request is what
a web service in the guest would be tricked into.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

HEAD_BYTES_MAX = 8192
HEADERS_MAX = 64
_LINE = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]{0,1023}) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\x20-\x7e\t\x80-\xff]*)")
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    505: "HTTP Version Not Supported",
}
READING = ("GET", "HEAD")
_FORWARDED = ("x-forwarded-for", "forwarded", "via")


class Refused(Exception):
    """What the request gets instead of content."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose head was right."""

    method: str
    path: str


@dataclass
class Reader:
    """Collects a request's head. `hosts`: what Host may say."""

    hosts: Sequence[str]
    _seen: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Request | None:
        """Take bytes as they come; return the request once its head is whole."""
        self._seen += data
        head, end, _ = bytes(self._seen).partition(b"\r\n\r\n")
        if len(head) > HEAD_BYTES_MAX:
            raise Refused(431, f"more than {HEAD_BYTES_MAX} bytes")
        return _parse(head, self.hosts) if end else None


def _parse(head: bytes, hosts: Sequence[str]) -> Request:
    line, *rest = head.split(b"\r\n")
    found = _LINE.fullmatch(line)
    if found is None:
        is_other = re.fullmatch(rb"[A-Z]+ /[\x21-\x7e]* HTTP/[0-9.]+", line)
        raise Refused(505, "HTTP/1.1 only") if is_other else Refused(400, "not a request line")
    headers = _headers(rest)
    _check(headers, hosts, is_new=found[3] == b"1")
    method = found[1].decode()
    if method not in READING:
        raise Refused(405, "this is for reading")
    return Request(method, found[2].decode())


def _headers(lines: list[bytes]) -> dict[str, list[str]]:
    if len(lines) > HEADERS_MAX:
        raise Refused(431, f"more than {HEADERS_MAX} headers")
    headers: dict[str, list[str]] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise Refused(400, "not a header")
        value = found[2].decode("latin-1").strip(" \t")
        headers.setdefault(found[1].decode().lower(), []).append(value)
    return headers


def _check(headers: dict[str, list[str]], hosts: Sequence[str], *, is_new: bool) -> None:
    if "transfer-encoding" in headers or headers.get("content-length", ["0"]) != ["0"]:
        raise Refused(400, "a body is not taken")
    if any(name in headers for name in _FORWARDED):
        raise Refused(403, "not by way of a proxy")
    host = headers.get("host", [])
    if len(host) != 1 and (host or is_new):
        raise Refused(400, "one Host is needed")
    if host and host[0].removesuffix(":80") not in hosts:
        raise Refused(403, "not by another name")


def respond(status: int, content: bytes, kind: str, *, has_body: bool = True) -> bytes:
    """Return the whole answer; `has_body` is false for HEAD."""
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(content)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if status == 405:
        lines.append(f"Allow: {', '.join(READING)}")
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return head + content if has_body else head
