"""The port to a control plane, and the one that is always there: the node's own API.

An implementation connects, hands over everything that is wanted, then each change, and takes
reports. It knows nothing of the store: what is new, old or refused is decided by `Intake`, what
is reported by the outbox. Nothing here is a setting yet: a node has the embedded one.
"""

from __future__ import annotations

from typing import Protocol

import anyio

from chv.common.errors import Unsupported
from chv.common.wire.upstream import Report, Wanted


class Session(Protocol):
    """One connection, as the agent hears of it. Once it has ended nothing said to it counts."""

    async def relist(self, objects: tuple[Wanted, ...]) -> None:
        """Hand over all that is wanted; the first word of a session, and whenever in doubt."""
        ...

    async def change(self, wanted: Wanted) -> None:
        """Hand over one object as it is wanted by now; in any order, any number of times."""
        ...

    def contact(self) -> None:
        """Say that the control plane has answered just now."""
        ...


class Upstream(Protocol):
    """A control plane. `embedded`: it is the node's own API; nothing comes in and nothing goes."""

    embedded: bool

    async def follow(self, session: Session) -> None:
        """Connect and serve the session until the connection is lost; then return or raise.

        Raises ChvError alone. Cancelling it closes the connection.
        """
        ...

    async def report(self, reports: tuple[Report, ...]) -> None:
        """Return once all are taken, in this order; raise ChvError where that is not certain."""
        ...


class Embedded:
    """The node's own API is its control plane: always seen, nothing to report to."""

    embedded = True

    async def follow(self, session: Session) -> None:
        """Nothing comes."""
        await anyio.sleep_forever()

    async def report(self, reports: tuple[Report, ...]) -> None:
        """Nobody asked for one."""
        raise Unsupported("the node is its own control plane: there is nobody to report to")
