"""Errors of the daemons in the words of those who named the objects."""

from __future__ import annotations

from chv.agent.naming import named, named_data, named_error
from chv.common.errors import InUse
from chv.common.ids import Ids
from tests.sim.bench import open_bench, volume
from tests.sim.virtual import simulated


@simulated
async def test_an_error_names_what_is_known_and_keeps_its_kind() -> None:
    async with open_bench() as bench:
        await bench.apply(volume())
        uid, stranger = bench.get("Volume", "data").metadata.uid, Ids().uid()
        tables = bench.engine._ledger.tables
        error = InUse(
            f"volume {uid} has these bytes already, {stranger} has not",
            resource=uid,
            field="backend.block",
            hint=f"delete {uid}",
        )

        told = named_error(tables, error)

        assert type(told) is InUse
        assert told.message == f"volume default/data has these bytes already, {stranger} has not"
        assert (told.resource, told.field, told.hint) == (
            "default/data",
            "backend.block",
            "delete default/data",
        )
        data = named_data(tables, error.data())
        assert data == told.data()


@simulated
async def test_what_names_nobody_stays_the_very_same() -> None:
    async with open_bench() as bench:
        error = InUse("the host uses device '/dev/sdx'")
        assert named_error(bench.engine._ledger.tables, error) is error
        assert named_data(bench.engine._ledger.tables, None) is None
        assert named(bench.engine._ledger.tables, "") == ""
