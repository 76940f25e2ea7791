"""A cable for the probe: a tap in a namespace of its own; DHCP, DNS and echo servers behind it.

`opened` makes it all and takes it away again. The namespace has a name of its own for each process,
so that test workers do not meet.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMESPACE = f"chv-probe-{os.getpid()}"
TUNSETIFF = 0x400454CA
TAP, NO_PI, VNET_HEADER = 0x0002, 0x1000, 0x4000
_dhcp: list[subprocess.Popen[bytes]] = []

# Runs in the namespace: echoes on port 7.
ECHO = """
import socketserver, sys, threading
class Tcp(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(self.request.recv(100))
class Udp(socketserver.BaseRequestHandler):
    def handle(self):
        self.request[1].sendto(self.request[0], self.client_address)
place = (sys.argv[1], 7)
servers = [socketserver.TCPServer(place, Tcp), socketserver.UDPServer(place, Udp)]
threading.Thread(target=servers[0].serve_forever, daemon=True).start()
print("ready", flush=True)
servers[1].serve_forever()
"""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _inside(*argv: str) -> list[str]:
    return ["ip", "netns", "exec", NAMESPACE, *argv]


def _open_tap() -> int:
    """Open the tap of the namespace from a thread that is in it for as long as that takes."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{NAMESPACE}", os.O_RDONLY)
    try:
        _enter(there)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = TAP | NO_PI | VNET_HEADER
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", b"tap0", flags))
        return device
    finally:
        _enter(home)
        os.close(home)
        os.close(there)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _dnsmasq(home: Path, net: str) -> list[str]:
    return _inside(
        "dnsmasq", "-k", "-C", "/dev/null", "-u", "root", "--interface=tap0", "--bind-interfaces",
        "-R", "-h", f"--dhcp-range={net}.50,{net}.99,255.255.255.0,1h", "--dhcp-authoritative",
        "--dhcp-option=option:mtu,1400", "--domain=probe.test", "--local=/probe.test/",
        "--no-ping", f"--host-record=web.probe.test,{net}.7",
        f"--dhcp-leasefile={home}/leases", f"--pid-file={home}/dnsmasq.pid",
    )  # fmt: skip


@contextmanager
def opened(home: Path, net: str) -> Iterator[int]:
    """Make the cable; the descriptor is the VMM's end of it."""
    if shutil.which("dnsmasq") is None:
        pytest.skip("no dnsmasq")
    _ip("netns", "add", NAMESPACE)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for arguments in (
            ("link", "set", "lo", "up"),
            ("tuntap", "add", "tap0", "mode", "tap", "vnet_hdr"),
            ("addr", "add", f"{net}.1/24", "dev", "tap0"),
            ("link", "set", "tap0", "up"),
        ):
            _ip("-n", NAMESPACE, *arguments)
        tap = _open_tap()
        started.append(subprocess.Popen(_dnsmasq(home, net), stderr=subprocess.DEVNULL))
        _dhcp[:] = started
        echo = subprocess.Popen(
            _inside(sys.executable, "-c", ECHO, f"{net}.1"), stdout=subprocess.PIPE
        )
        started.append(echo)
        assert echo.stdout is not None
        assert echo.stdout.readline() == b"ready\n"
        yield tap
        os.close(tap)
    finally:
        for process in started:
            process.kill()
            process.wait()
        _ip("netns", "del", NAMESPACE)


def silence_dhcp() -> None:
    """Take DHCP and DNS away."""
    for process in _dhcp:
        process.kill()
        process.wait()


def ping(address: str) -> bool:
    """Return whether the guest answers from the other end of the cable."""
    argv = _inside(sys.executable, "-c", PING, address)
    return subprocess.run(argv, capture_output=True).returncode == 0


# No program for it can be counted on: one echo request by a raw socket.
PING = """
import socket, struct, sys
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
raw.settimeout(3)
body = struct.pack("!BBHHH", 8, 0, 0, 77, 1) + b"probe-ping"
raw.sendto(body[:2] + struct.pack("!H", checksum(body)) + body[4:], (sys.argv[1], 0))
while True:
    answer = raw.recv(2000)[20:]
    if answer[0] == 0 and answer[4:8] == struct.pack("!HH", 77, 1):
        break
"""
