"""Loads the rules of one network: the smallest transaction that we can tell, noted as it stands.

Blocking: call in a thread. The caller holds the network's lock. Fails with Conflict when somebody
else changed rules in the same moment; the next pass then loads all of them.
"""

from __future__ import annotations

from chv.common.errors import Conflict
from chv.common.failpoint import failpoint_sync
from chv.nwd import runfiles
from chv.nwd.kernel import netns, nft_generation
from chv.nwd.nft.ruleset import Applied
from chv.nwd.nft.text import Ruleset
from chv.nwd.parts import Parts


def load_rules(parts: Parts, network_id: str, ruleset: Ruleset, verb: str) -> bool:
    """Bring the rules in a network's namespace up to date.

    Return whether connections may be tracked there that came about before these rules stood.
    """

    def note(applied: Applied) -> None:
        failpoint_sync(f"nwd.{verb}.rules_loaded")
        runfiles.note_rules(runfiles.prepare(parts.layout, network_id), applied)

    if network_id not in parts.loaded and _stand(parts, network_id, ruleset):
        return True  # loaded before this process began
    before = parts.loaded.pop(network_id, None)
    loaded = parts.nft.load_now(parts.netns_path(network_id), ruleset, before, note)
    if loaded is None:
        raise Conflict("somebody changed nft rules in the same moment", resource=network_id)
    parts.loaded[network_id] = loaded
    return loaded.is_busy


def restore_rules(parts: Parts, network_id: str, ruleset: Ruleset, verb: str) -> bool:
    """Load the rules where there is a namespace and others do not stand; True when it was done."""
    if netns.presence(parts.layout.netns(network_id)) is not netns.Presence.PRESENT:
        return False
    known = parts.loaded.get(network_id)
    if known is not None and known.applied.digest == ruleset.digest:
        path = parts.netns_path(network_id)
        now = netns.call_in(path, lambda: (netns.inode(path), nft_generation.read()))
        if (known.applied.inode, known.applied.generation) == now:
            return False
    load_rules(parts, network_id, ruleset, verb)
    return True


def _stand(parts: Parts, network_id: str, ruleset: Ruleset) -> bool:
    """Tell whether these very rules stand, as an earlier process has noted it."""
    noted = runfiles.applied_rules(parts.layout.network_run(network_id))
    if noted is None or noted.digest != ruleset.digest:
        return False
    path = parts.netns_path(network_id)
    now = netns.call_in(path, lambda: (netns.inode(path), nft_generation.read()))
    return (noted.inode, noted.generation) == now
