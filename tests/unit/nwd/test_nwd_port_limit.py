"""A bridge has so many ports and no more: who asks for one too many is told the number."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from chv.common.errors import ResourceExhausted
from chv.common.wire.nwd import BRIDGE_PORTS_MAX
from chv.nwd import nic_rows
from chv.nwd.kernel.errors import translate
from chv.nwd.nic_rows import NicRows
from tests.unit.nwd.nwd_rows import attach, network, open_parts


async def test_one_nic_too_many_is_refused_with_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nic_rows, "BRIDGE_PORTS_MAX", 2)
    async with open_parts(tmp_path / "db") as parts:
        rows, net = NicRows(parts.layout, parts.records, parts.boot_id), network()
        await parts.records.put_network(net)
        for name in ("one", "two"):
            row = rows.make(attach(net.network_id, hostname=name), None, net)
            await parts.records.put_nic(row)
        with pytest.raises(ResourceExhausted, match="has 2 NICs, and a bridge takes 2"):
            rows.make(attach(net.network_id), None, net)
        again = attach(net.network_id, nic_id=row.nic_id, vm_id=row.vm_id, hostname="two")
        assert rows.make(again, row, net).nic_id == row.nic_id, "one that is there stays"


def test_the_kernels_own_refusal_names_the_number() -> None:
    assert BRIDGE_PORTS_MAX == 1023
    assert "1023 ports" in str(translate(errno.EXFULL, "adding a port"))
