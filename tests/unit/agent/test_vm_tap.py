"""A tap that is lost under a running VM, on a simulated machine."""

from __future__ import annotations

from tests.sim.bench import everything, open_bench
from tests.sim.virtual import simulated


@simulated
async def test_a_running_vm_whose_tap_was_made_anew_is_told_and_goes_on() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        await bench.until("NetworkReady")
        await bench.until("SSHReady")
        process = bench.process("web")
        (nic,) = bench.machine.host.nwd.nics.values()
        nic.tap_lost = True
        seen = await bench.until("NetworkReady", status="False", timeout_s=60.0)
        shown = next(each for each in seen.status.conditions if each.type == "NetworkReady")
        assert shown.reason == "TapLost"
        assert "chv restart web" in shown.message
        assert repr(seen.spec.interfaces[0].name) in shown.message
        assert bench.process("web") is process, "nobody asked for a restart"
