"""Lists of objects come in pages; their order is that of namespace and name."""

from __future__ import annotations

import msgspec
import pytest

from chv.common import pages
from chv.common.wire import agent as api
from tests.sim.bench import open_bench

NAMES = [("a", "x"), ("a", "x-1"), ("a-b", "a"), ("a-b", "z"), ("b", "a")]


def _network(namespace: str, name: str, number: int) -> dict[str, object]:
    return {
        "apiVersion": "compute.chv.dev/v1alpha1",
        "kind": "Network",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"subnet": f"10.64.{number}.0/24"},
    }


async def test_pages_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES_MAX", 1)
    async with open_bench() as bench:
        documents = [_network(*key, number) for number, key in enumerate(NAMES)]
        raw = [msgspec.Raw(msgspec.json.encode(each)) for each in reversed(documents)]
        await bench.engine.apply(api.Apply(objects=raw, requester="test"))

        async def call(_: object, request: api.ListObjects) -> api.ListReply:
            reply = bench.engine.list(request)
            assert len(reply.items) == len(reply.ages_s) <= 1
            return reply

        reply = await pages.whole(
            call, api.LIST, api.ListObjects(kind="Network"), "items", "ages_s"
        )
        metadata = [msgspec.json.decode(item)["metadata"] for item in reply.items]
        assert [(each["namespace"], each["name"]) for each in metadata] == NAMES
        assert len(reply.ages_s) == len(NAMES)
        one = await pages.whole(
            call, api.LIST, api.ListObjects(kind="Network", namespace="a-b"), "items"
        )
        assert len(one.items) == 2
