"""Options, sockets and signals of the double; see the package."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

from tests.doubles.cloud_hypervisor.api import Api
from tests.doubles.cloud_hypervisor.events import Events
from tests.doubles.cloud_hypervisor.http import Server
from tests.doubles.cloud_hypervisor.loop import Loop
from tests.doubles.cloud_hypervisor.switches import Switches, switches
from tests.doubles.cloud_hypervisor.travelling import TravellingMachine


def _options(known: Switches) -> argparse.Namespace:
    parser = argparse.ArgumentParser("cloud-hypervisor", allow_abbrev=False, add_help=False)
    parser.add_argument("--api-socket", default="")
    parser.add_argument("--event-monitor", default="")
    parser.add_argument("--seccomp", default="true", choices=["true", "false", "log", "errno"])
    parser.add_argument("--log-file", default="")
    parser.add_argument("-v", action="count", default=0)
    parser.add_argument("-V", "--version", action="store_true")
    if known.major >= 52:
        parser.add_argument("--no-shutdown", action="store_true")
        parser.add_argument("--log-format", default="")
    if len(sys.argv) == 1:
        print("Launch a cloud-hypervisor VMM.")
        parser.exit(2)
    return parser.parse_args()


def _words(option: str) -> dict[str, str]:
    words = (word.partition("=") for word in option.split(",") if word)
    return {name: value for name, _, value in words}


def _listener(option: str) -> socket.socket:
    words = _words(option)
    if "fd" in words:
        return socket.socket(fileno=int(words["fd"]))
    path = words.get("path", option)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    return listener


def _events(option: str) -> Events:
    words = _words(option)
    if "fd" in words:  # wins over a path
        return Events(int(words["fd"]))
    if "path" in words:
        return Events(os.open(words["path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    return Events(None)


def main() -> int:
    known = switches()
    options = _options(known)
    if options.version:
        print(f"cloud-hypervisor v{known.version}\nMigration Protocol Versions: 0")
        return 0
    os.umask(0o077)
    if not known.kvm:
        print("Error: Failed to open the hypervisor interface (is host support available?)")
        return 1
    loop, events = Loop(), _events(options.event_monitor)
    machine = TravellingMachine(loop, events, known, stays=getattr(options, "no_shutdown", False))
    events.say("vmm", "starting")
    loop.after_each.append(events.flush)
    heard, bell = socket.socketpair()
    bell.setblocking(False)
    signal.set_wakeup_fd(bell.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # heard once the loop is not busy
    loop.watch(heard.fileno(), machine.end)
    Server(loop, _listener(options.api_socket), Api(machine).handle)
    events.flush()
    code = loop.run()
    events.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
