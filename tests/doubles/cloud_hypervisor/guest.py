"""A guest that speaks as the probe does and obeys its words, without executing anything.

Of the probe's words it knows off, reboot, halt, spin, triple, panic, ping, button=, cling and
let_go, and of its own `send` (a frame on every NIC). It looks at the button and at requests to let
devices go every LOOK_S, as the probe does, and not while its vCPUs stand.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

BOOT_S = 0.005
LOOK_S = 0.03
WORDS = ("off", "reboot", "halt", "spin", "triple", "panic")


class Machine(Protocol):
    """What a guest does to the machine that it is in."""

    def guest_says(self, data: bytes) -> None: ...
    def guest_activates(self, ids: tuple[str, ...] | None) -> int: ...
    def guest_sends(self) -> None: ...
    def guest_ejects(self, ids: tuple[str, ...]) -> None: ...
    def guest_ends(self, how: str) -> None: ...


class Guest:
    """Lives as long as a VM object; `look` is called every LOOK_S while vCPUs run."""

    def __init__(self, machine: Machine, command_line: str, *, silent: bool = False) -> None:
        self._machine, self._text = machine, command_line
        self._options = dict(w.partition("=")[::2] for w in command_line.split() if "=" in w)
        self._begun_s = time.monotonic()
        self._ready = self._stands = self._clings = self._pressed = False
        self._ignores = self._options.get("button") == "stay"
        self._leaving: list[str] = []
        self._found: list[str] = []
        self._line = b""
        self._beats = 0
        self._beat_s = self._begun_s
        if not silent:
            self.say("boot protocol=1")

    def say(self, text: str) -> None:
        age_us = int((time.monotonic() - self._begun_s) * 1e6)
        self._machine.guest_says(f"@{age_us} {text}\n".encode())

    def press(self) -> None:
        self._pressed = True

    def found(self, device: str) -> None:
        self._found.append(device)

    def asked_to_release(self, device: str) -> None:
        self._leaving.append(device)

    def kept(self) -> dict[str, Any]:
        """Return what a snapshot holds of it."""
        return {"ready": self._ready, "ignores": self._ignores, "clings": self._clings}

    def restore(self, kept: dict[str, Any]) -> None:
        self._ready, self._ignores = kept["ready"], kept["ignores"]
        self._clings = kept["clings"]

    def look(self) -> None:
        """Do what is due."""
        if self._stands:
            return
        if not self._ready:
            self._come_up()
        if self._pressed:
            self._pressed = False
            self._button()
        if self._found:
            found, self._found = tuple(self._found), []
            self._machine.guest_activates(found)
        if self._leaving and not self._clings and not self._stands:
            leaving, self._leaving = tuple(self._leaving), []
            self._machine.guest_ejects(leaving)
        self._beat()
        self._end_when_due()

    def _come_up(self) -> None:
        self._ready = True
        self.say(f'command text="{self._text}"')
        self.say(f"ready virtio={self._machine.guest_activates(None)}")
        if self._options.get("net"):
            self._machine.guest_sends()

    def _beat(self) -> None:
        every_s = int(self._options.get("beat", "1000")) / 1000
        if every_s and not self._stands and time.monotonic() - self._beat_s >= every_s:
            self._beat_s = time.monotonic()
            self._beats += 1
            self.say(f"beat n={self._beats}")

    def _end_when_due(self) -> None:
        how = self._options.get("end", "")
        after_s = int(self._options.get("end.after", "0")) / 1000
        if how in WORDS and not self._stands and time.monotonic() - self._begun_s >= after_s:
            self._end(how)

    def _button(self) -> None:
        self.say("button name=power")
        if not self._ignores:
            self._end("off")

    def typed(self, data: bytes) -> None:
        """Take characters from the serial port; a line is a command."""
        *lines, self._line = (self._line + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            for word in line.replace(b"\0", b"").decode(errors="replace").split():
                self._obey(word)

    def _obey(self, word: str) -> None:
        if self._stands:
            return
        name, _, value = word.partition("=")
        if name == "end":
            name = value
        if name in WORDS:
            self._end(name)
        elif name == "ping":
            self.say(f'pong token="{value}"')
        elif name == "send":
            self._machine.guest_sends()
        elif name == "button" and value in ("stay", "off"):
            self._ignores = value == "stay"
            self.say(f"button-set how={value}")
        elif name in ("cling", "let_go"):
            self._clings = name == "cling"
            self.say(f"clings devices={int(self._clings)}")
        else:
            self.say(f'input-refused text="{word}"')

    def _end(self, how: str) -> None:
        self.say(f"end how={how}")
        self._stands = True
        self._machine.guest_ends("reboot" if how == "triple" else how)
