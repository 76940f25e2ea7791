"""Loads the rules of one network: the smallest transaction that we can tell, noted as it stands.

The caller holds the network's lock. Fails with Conflict when somebody else changed rules in the
same moment; the next pass then loads all of them.
"""

from __future__ import annotations

from chv.common.errors import Conflict
from chv.common.failpoint import failpoint_sync
from chv.nwd import runfiles
from chv.nwd.nft.ruleset import Applied
from chv.nwd.nft.text import Ruleset
from chv.nwd.parts import Parts


async def load_rules(parts: Parts, network_id: str, ruleset: Ruleset, verb: str) -> None:
    """Bring the rules in a network's namespace up to date."""

    def note(applied: Applied) -> None:
        """In a thread, right after the rules were loaded."""
        failpoint_sync(f"nwd.{verb}.rules_loaded")
        runfiles.note_rules(runfiles.prepare(parts.layout, network_id), applied)

    before = parts.loaded.pop(network_id, None)
    loaded = await parts.nft.load(parts.netns_path(network_id), ruleset, before, note)
    if loaded is None:
        raise Conflict("somebody changed nft rules in the same moment", resource=network_id)
    parts.loaded[network_id] = loaded
