"""A sandbox for a development node: a network namespace with a pretend uplink.

Two namespaces and one veth pair, nothing in the machine's own namespace:

    chvbox-<instance>-host, nwd's host          chvbox-<instance>-wan
            up0 198.18.0.2/24  <---- veth ---->  up0 198.18.0.1/24

Only the node's networks live there: nwd takes it for the host (`network.host_netns`). The agent
stays outside, since it has packages to fetch. 198.18.0.0/15 is set aside for test networks
(RFC 2544), so it collides with nobody's real uplink.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chv.common.process import CommandFailed, run

UPLINK = "up0"
HOST_ADDRESS = "198.18.0.2"
WAN_ADDRESS = "198.18.0.1"
PREFIX = 24
TIMEOUT_S = 10.0
NETNS_ROOT = Path("/run/netns")


@dataclass(frozen=True)
class Sandbox:
    """The two namespaces of one instance."""

    instance: str

    @property
    def host(self) -> str:
        """Name of the namespace that nwd takes for the host's."""
        return f"chvbox-{self.instance}-host"

    @property
    def wan(self) -> str:
        """Name of the namespace that plays the outside world."""
        return f"chvbox-{self.instance}-wan"

    @property
    def host_path(self) -> str:
        """Path of that namespace."""
        return str(NETNS_ROOT / self.host)

    def exists(self) -> bool:
        """Whether both namespaces are there."""
        return all((NETNS_ROOT / name).exists() for name in (self.host, self.wan))

    async def ensure(self) -> None:
        """Make both namespaces and the link between them. Idempotent."""
        for name in (self.host, self.wan):
            if not (NETNS_ROOT / name).exists():
                await _ip("netns", "add", name)
            await _ip("-n", name, "link", "set", "lo", "up")
        if not await self._linked():
            await _ip("-n", self.host, "link", "add", UPLINK, "type", "veth",
                      "peer", "name", UPLINK, "netns", self.wan)  # fmt: skip
        for name, address in ((self.host, HOST_ADDRESS), (self.wan, WAN_ADDRESS)):
            await _ip("-n", name, "address", "replace", f"{address}/{PREFIX}", "dev", UPLINK)
            await _ip("-n", name, "link", "set", UPLINK, "up")
        await _ip("-n", self.host, "route", "replace", "default", "via", WAN_ADDRESS)

    async def _linked(self) -> bool:
        found = await run(
            ("ip", "-n", self.host, "link", "show", UPLINK), timeout_s=TIMEOUT_S, check=False
        )
        return found.returncode == 0

    async def remove(self) -> None:
        """Remove both; the link goes with them. Idempotent."""
        for name in (self.host, self.wan):
            await remove_netns(name)


async def remove_netns(name: str) -> None:
    """Remove a namespace; already gone, or going in another process, is fine."""
    if not (NETNS_ROOT / name).exists():
        return
    try:
        await _ip("netns", "delete", name)
    except CommandFailed:
        if (NETNS_ROOT / name).exists():
            raise


async def _ip(*arguments: str) -> None:
    await run(("ip", *arguments), timeout_s=TIMEOUT_S)
