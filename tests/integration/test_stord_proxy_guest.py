"""A real guest writes through deaths of its storage daemon and proxy, several requests in flight.

With CHV_LONG=1 the full counts of kills, else a sample.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from chv.common.wire import stord as wire
from chv.guest.tiny import load_tiny
from chv.images import ImageStore, builtin, ensure_builtin
from tests.helpers import wait_until
from tests.integration.stord_helpers import IDS, MIB, needs_qsd, qsd_major
from tests.integration.test_stord_proxy import end_backend, kill_proxy, patient_node, session
from tests.integration.tiny_vm import BOOT_TIMEOUT_S, TinyVm, boot

pytestmark = [pytest.mark.root, pytest.mark.slow, needs_qsd]
CACHE = Path("/var/cache/chv")
LONG = bool(os.environ.get("CHV_LONG"))
KILLS, TERMS, PROXY_KILLS, RESTARTS = (40, 10, 5, 25) if LONG else (4, 2, 1, 3)
WRITERS = 4
# Each writer has 64 blocks of its own. A block is written directly, read back directly, and says
# which round wrote it; at the end every block is read again.
WRITE = """
cat > /tmp/write <<'END'
i=0
while [ ! -e /tmp/stop ]; do
  i=$((i + 1)); at=$(($1 * 1024 + i % 64))
  printf '%016d' $i | dd of=/dev/vdc bs=4096 seek=$at conv=sync,notrunc oflag=direct \\
    2> /dev/null || echo write $1 $i >> /tmp/bad
  got=$(dd if=/dev/vdc bs=4096 skip=$at count=1 iflag=direct 2> /dev/null | head -c 16)
  [ "$got" = "$(printf '%016d' $i)" ] || echo read $1 $i: $got >> /tmp/bad
  echo "round $1 $i end" > /dev/console
done
j=$((i - 63)); [ $j -gt 0 ] || j=1
while [ $j -le $i ]; do
  got=$(dd if=/dev/vdc bs=4096 skip=$(($1 * 1024 + j % 64)) count=1 iflag=direct 2> /dev/null \\
    | head -c 16)
  [ "$got" = "$(printf '%016d' $j)" ] || echo check $1 $j: $got >> /tmp/bad
  j=$((j + 1))
done
echo done > /tmp/done.$1
END
: > /tmp/bad
for w in 0 1 2 3; do (sh /tmp/write $w > /dev/null 2>&1 &); done
"""


async def test_a_real_guest_writes_and_verifies_through_deaths_of_its_workers(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await ensure_builtin("tiny", CACHE, ImageStore(tmp_path_factory.mktemp("store")), print)
    image = load_tiny(CACHE / f"tiny-{builtin.codename()}")
    assert image is not None
    async with patient_node(monkeypatch) as node:
        volume_id, vm_id = IDS.uid(), IDS.uid()
        await node.open(volume_id, size_bytes=32 * MIB)
        info = await node.attach(volume_id, vm_id)
        async with boot(image, tmp_path, seeded=True, extra=disk(info.export_path)) as vm:
            await wait_until(lambda: answers(vm), timeout_s=BOOT_TIMEOUT_S)
            cache = await vm.ssh("cat /sys/block/vdc/cache_type")
            assert cache == (0, "write back\n")
            assert await vm.ssh("cat /sys/block/vdc/size") == (0, f"{32 * MIB // 512}\n")
            assert await vm.ssh(WRITE) == (0, "")
            await wrote(vm, 3)
            for number in [signal.SIGKILL] * KILLS + [signal.SIGTERM] * TERMS:
                await end_backend(node, vm_id, number)
                await wrote(vm, 2)
            for _ in range(PROXY_KILLS):
                await kill_proxy(node, vm_id)
                await wrote(vm, 2)
            losses = (await session(node, vm_id)).losses
            for _ in range(RESTARTS):
                await node.restart(vm_id)
                await wrote(vm, 2)
            assert (await session(node, vm_id)).losses == losses
            await vm.ssh("touch /tmp/stop")
            await wait_until(lambda: finished(vm), timeout_s=60, what="nothing hangs")
            assert await vm.ssh("cat /tmp/bad") == (0, "")
            assert await vm.ssh("dmesg | grep -i 'I/O error'") == (1, "")
            row = await session(node, vm_id)
            assert row.crash_class is wire.CrashClass.KEEP_VM
            assert row.losses >= KILLS + TERMS
        await node.detach(volume_id, vm_id)
        assert node.workers() == []


def disk(path: str) -> list[str]:
    memory = "memory-backend-memfd,id=mem,size=256M,share=on"
    device = "vhost-user-blk-pci,chardev=vu,num-queues=1,addr=0x10"  # last: /dev/vdc
    again = "reconnect-ms=100" if qsd_major() >= 10 else "reconnect=1"
    chardev = f"socket,id=vu,path={path},{again}"
    options = ("-object", memory, "-machine", "memory-backend=mem", "-chardev", chardev)
    return [*options, "-device", device]


async def answers(vm: TinyVm) -> bool:
    return (await vm.ssh("true"))[0] == 0


async def finished(vm: TinyVm) -> bool:
    return (await vm.ssh("ls /tmp/done.*"))[1].count("/tmp/done.") == WRITERS


async def wrote(vm: TinyVm, count: int) -> None:
    """Wait until every writer has made that many further rounds; they say so on the console."""
    goals = [each + count for each in rounds(vm)]

    def reached() -> bool:
        return all(now >= goal for now, goal in zip(rounds(vm), goals, strict=True))

    await wait_until(reached, timeout_s=60, what="writes go on")


def rounds(vm: TinyVm) -> list[int]:
    said = re.findall(r"round (\d) (\d+) end", vm.console)
    last = {int(writer): int(count) for writer, count in said}
    return [last.get(writer, 0) for writer in range(WRITERS)]
