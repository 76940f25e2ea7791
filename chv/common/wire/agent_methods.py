"""Every method of the agent's API: what its server serves, in one table."""

from __future__ import annotations

from chv.common.wire.agent import METHODS
from chv.common.wire.agent_clone import CLONE_METHODS
from chv.common.wire.agent_console import CONSOLE_METHODS
from chv.common.wire.agent_events import EVENT_METHODS
from chv.common.wire.agent_history import HISTORY_METHODS
from chv.common.wire.agent_inventory import INVENTORY_METHODS
from chv.common.wire.agent_leaks import LEAK_METHODS
from chv.common.wire.agent_node import NODE_METHODS
from chv.common.wire.agent_rebuild import REBUILD_METHODS
from chv.common.wire.agent_waiting import WAITING_METHODS

AGENT_METHODS = (
    *METHODS,
    *CLONE_METHODS,
    *REBUILD_METHODS,
    *HISTORY_METHODS,
    *EVENT_METHODS,
    *NODE_METHODS,
    *LEAK_METHODS,
    *INVENTORY_METHODS,
    *CONSOLE_METHODS,
    *WAITING_METHODS,
)
