"""stord is killed while several volumes are attached in one call; the repeat attaches them all.

Raw ones with their proxies, and a mix without. With CHV_LONG=1 every failpoint, else a sample.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from chv.common.errors import OutcomeUnknown, Unavailable
from chv.common.wire import stord as wire
from tests.integration.stord_helpers import IDS, Node, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk
from tests.sampling import paired, sampled

pytestmark = [pytest.mark.root, needs_qsd]
PLAIN = (
    *("after_intent", "after_grant", "before_spawn", "after_spawn", "after_worker_record"),
    *("after_prime", "after_rename", "after_record"),
)
PROXY = ("before_proxy_spawn", "after_proxy_spawn", "after_proxy_record", "after_proxy_rename")
CASES = (
    *((place, ("raw", "qcow2", "qcow2")) for place in (*PLAIN, "after_move")),
    *((place, ("raw", "raw", "raw")) for place in (*PLAIN, *PROXY)),
)
SAMPLE = 6
CHOSEN = sampled(CASES, SAMPLE, seed=19)


@pytest.mark.parametrize(("case", "nth"), paired(CHOSEN, [1, 2]))
async def test_a_kill_while_several_are_attached_leaves_one_daemon_and_all_are_served(
    case: tuple[str, tuple[str, ...]], nth: int
) -> None:
    place, formats = case
    before = f"{nth - 1}*off->" if nth > 1 else ""
    async with open_node(start=False, storage='proxy = "auto"') as node:
        await node.start(failpoints=f"stord.attach.{place}={before}1*kill")
        ids, vm = [IDS.uid() for _ in formats], IDS.uid()
        for volume_id, format_ in zip(ids, formats, strict=True):
            await node.open(volume_id, format=format_)
        outcomes = await attach(node, ids, vm)
        for outcome in outcomes.values():
            assert outcome.attachment is not None, outcome.error
            works(outcome.attachment)
        kinds = [found.worker_id.split(":")[2] for found in node.workers()]
        assert kinds.count("qsd") == 1, kinds
        assert kinds.count("proxy") == (3 if set(formats) == {"raw"} else 0), kinds
        for volume_id in ids:
            await node.detach(volume_id, vm)
        assert node.workers() == []
        assert node.run_files() == []
        assert node.cgroups() == []


async def attach(node: Node, ids: list[str], vm: str) -> dict[str, wire.AttachOutcome]:
    """Attach them; where stord dies of it, again on the next. Some places are passed once only."""
    try:
        return await node.attach_all(ids, vm)
    except (OutcomeUnknown, Unavailable):
        assert await node.ended() == -signal.SIGKILL
        await node.start()
        return await node.attach_all(ids, vm)


def works(info: wire.AttachmentInfo) -> None:
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write_back
        assert disk.write(0, b"d" * 512) == 0
        assert disk.read(0, 512) == b"d" * 512
