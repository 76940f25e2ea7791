"""Verbs whose operations run beside the one that makes an object as wanted. Pure."""

from __future__ import annotations

IMPORT = "import"
COLLECT_IMAGES = "collect_images"
CREATE_KEY = "create_key"
DELETE_KEY = "delete_key"
REAP_LEAK = "reap_leak"
ADOPT_LEAK = "adopt_leak"
RESTART_DAEMON = "restart_daemon"
RESET_NODE = "reset_node"
# Of no object: `chv.agent.chores` carries them out.
CHORE_VERBS = frozenset(
    {
        IMPORT,
        COLLECT_IMAGES,
        CREATE_KEY,
        DELETE_KEY,
        REAP_LEAK,
        ADOPT_LEAK,
        RESTART_DAEMON,
        RESET_NODE,
    }
)
