"""Whether a tap can take frames: looked at by its descriptor, in whichever namespace it lies.

A NIC whose tap refuses a frame loses the thread that serves it, and the next pause of the VM then
waits for that thread for ever, and with it the VMM's whole API. Raises FailedPrecondition naming
the tap whose link is down, InvalidArgument where a descriptor is no tap.
"""

from __future__ import annotations

import fcntl
import select
from collections.abc import Sequence

from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.vmm.driver import NicConfig

_TUNGETIFF = 0x800454D2
_IFREQ_BYTES, _NAME_BYTES = 40, 16


def require_up(nic: NicConfig, fds: Sequence[int]) -> None:
    """Refuse a NIC with a tap that is down, or gone: the kernel calls neither writable."""
    for fd in fds:
        name = _name(nic, fd)
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        seen = dict(poll.poll(0)).get(fd, 0)
        if seen & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            raise FailedPrecondition(f"tap {name} of NIC {nic.id} is gone", field="fds")
        if not seen & select.POLLOUT:
            raise FailedPrecondition(
                f"the link of tap {name} of NIC {nic.id} is down",
                field="fds",
                hint="set it up first: the guest's first frame would end the NIC",
            )


def _name(nic: NicConfig, fd: int) -> str:
    try:
        told = fcntl.ioctl(fd, _TUNGETIFF, bytes(_IFREQ_BYTES))
    except OSError as error:
        raise InvalidArgument(
            f"descriptor {fd} of NIC {nic.id} is no tap: {error.strerror}", field="fds"
        ) from error
    return told[:_NAME_BYTES].partition(b"\0")[0].decode(errors="replace")
