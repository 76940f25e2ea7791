"""Whether the threads of a VMM are held by their seccomp filters, as the kernel shows it.

QEMU holds all of its threads. Cloud Hypervisor's main thread has no filter in v53, so that "every
thread" would be the wrong question there: those that touch the guest or a client are looked at by
name. Fails with NotFound where the process is gone.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from chv.common.errors import NotFound

ALWAYS = ("event-monitor", "http-server", "vmm", "vmm_signal_hand")
SERIAL = "serial-manager"
_VCPU = re.compile(r"vcpu[0-9]+")
_MODE = re.compile(r"^Seccomp:\s*([0-9])$", re.MULTILINE)
_FILTER = "2"


def unfiltered_by_name(pid: int) -> tuple[str, ...]:
    """Return Cloud Hypervisor's threads without a filter, or missing though they should be."""
    modes = _modes(pid)
    wanted = {*ALWAYS, *filter(_VCPU.fullmatch, modes)}
    return tuple(sorted(name for name in wanted if modes.get(name) != _FILTER))


def serves_serial(pid: int) -> bool:
    """Tell whether the thread lives that serves the serial port of a running VM.

    In v53 it ends for good, until the VM is reset, when a viewer closes with bytes unread.
    """
    return SERIAL in _modes(pid)


def unfiltered_of_all(pid: int) -> tuple[str, ...]:
    """Return the threads of a VMM all of whose threads are to be held that are not."""
    return tuple(sorted(name for name, mode in _modes(pid).items() if mode != _FILTER))


def _modes(pid: int) -> dict[str, str]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError as error:
        raise NotFound(f"no process {pid}") from error
    found: dict[str, str] = {}
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # ended since
            name = (task / "comm").read_text().strip()
            mode = _MODE.search((task / "status").read_text())
            found[name] = mode[1] if mode else "0"
    return found
