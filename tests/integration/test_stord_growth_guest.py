"""A disk becomes larger under a real guest that writes to it all the time, and is used at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from chv.common.wire import stord as wire
from chv.guest.tiny import TinyImage, load_tiny
from chv.images import ImageStore, builtin, ensure_builtin
from tests.helpers import wait_until
from tests.integration.stord_helpers import (
    IDS,
    MIB,
    Node,
    needs_qsd,
    open_node,
    tells_new_sizes,
)
from tests.integration.test_stord_proxy_guest import (
    CACHE,
    WRITE,
    answers,
    disk,
    finished,
    wrote,
)
from tests.integration.tiny_vm import BOOT_TIMEOUT_S, TinyVm, boot

pytestmark = [pytest.mark.root, pytest.mark.slow, needs_qsd, tells_new_sizes]
BEFORE, AFTER, LAST = 32 * MIB, 48 * MIB, 64 * MIB
# Read past every cache: the first block beyond the size that the disk had.
BEYOND = """
printf '%016d' 77 | dd of=/dev/vdc bs=4096 seek=SEEK conv=sync,notrunc oflag=direct 2> /dev/null
dd if=/dev/vdc bs=4096 skip=SEEK count=1 iflag=direct 2> /dev/null | head -c 16
"""


@pytest.fixture(scope="module")
async def image(tmp_path_factory: pytest.TempPathFactory) -> TinyImage:
    await ensure_builtin("tiny", CACHE, ImageStore(tmp_path_factory.mktemp("store")), print)
    found = load_tiny(CACHE / f"tiny-{builtin.codename()}")
    assert found is not None
    return found


@pytest.mark.parametrize(("format", "proxy"), [("raw", "auto"), ("raw", "off"), ("qcow2", "off")])
async def test_a_guest_sees_its_disk_grow_while_it_writes_and_uses_what_was_added(
    tmp_path: Path, image: TinyImage, format: str, proxy: str
) -> None:
    fields: dict[str, Any] = {"format": wire.VolumeFormat(format)}
    async with open_node(storage=f'proxy = "{proxy}"') as node:
        volume, vm_id = IDS.uid(), IDS.uid()
        await node.ensure(volume, size_bytes=BEFORE, **fields)
        info = await node.attach(volume, vm_id)
        early = await node.ensure(volume, 1, wire.VmmClient.QEMU, size_bytes=BEFORE, **fields)
        async with boot(image, tmp_path, seeded=True, extra=disk(info.export_path)) as vm:
            await wait_until(lambda: answers(vm), timeout_s=BOOT_TIMEOUT_S)
            assert await size(vm) == BEFORE
            assert await vm.ssh(WRITE) == (0, "")
            await wrote(vm, 3)

            await grow(node, vm, volume, 2, AFTER, **fields)
            if proxy == "auto":  # a storage daemon that comes after it serves the new size
                os.kill(info.backend_pid, signal.SIGKILL)
                await wrote(vm, 3)
                assert await size(vm) == AFTER
                await grow(node, vm, volume, 3, LAST, **fields)

            await vm.ssh("touch /tmp/stop")
            await wait_until(lambda: finished(vm), timeout_s=60, what="nothing hangs")
            assert await vm.ssh("cat /tmp/bad") == (0, "")
            assert await vm.ssh("dmesg | grep -i 'I/O error'") == (1, "")
        await node.detach(volume, vm_id, generation=3)
        seen = await node.get(volume)
        assert early.size_bytes == BEFORE
        assert (seen.size_bytes, seen.pending_size_bytes) == (LAST if proxy == "auto" else AFTER, 0)


async def grow(
    node: Node, vm: TinyVm, volume: str, generation: int, size_bytes: int, **fields: Any
) -> None:
    """Grow it, see that in the guest, write and read beyond what there was, go on writing."""
    before = await size(vm)
    grown = await node.ensure(
        volume, generation, wire.VmmClient.QEMU, size_bytes=size_bytes, **fields
    )
    assert (grown.applied, grown.size_bytes) == ("online", size_bytes)

    async def is_seen() -> bool:
        return await size(vm) == size_bytes

    await wait_until(is_seen, timeout_s=10, what="the new size in the guest")
    block = str(before // 4096)
    assert await vm.ssh(BEYOND.replace("SEEK", block)) == (0, f"{77:016d}")
    await wrote(vm, 3)


async def size(vm: TinyVm) -> int:
    return int((await vm.ssh("cat /sys/block/vdc/size"))[1]) * 512
