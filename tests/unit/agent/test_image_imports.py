"""Images by URL and the collection of artifacts, on a simulated machine; who may name paths."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from chv.agent.image.callers import refuse_paths
from chv.common.errors import InvalidArgument, PermissionDenied
from chv.common.wire import agent as api
from tests.sim.bench import Bench, image, open_bench
from tests.sim.virtual import simulated
from tests.sim.vmms import SimImages

SHA256 = "d" * 64
REMOTE = {"url": "https://host/disk.raw", "sha256": SHA256, "format": "raw"}


class SlowNetwork:
    """A download that stands at its half until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = anyio.Event()
        self.cancelled = False
        original = SimImages.fetch

        async def fetch(images: SimImages, *arguments: Any) -> Any:
            *_, on_progress = arguments
            await on_progress(50, 100)
            try:
                await self.release.wait()
            except anyio.get_cancelled_exc_class():
                self.cancelled = True
                raise
            return await original(images, *arguments)

        monkeypatch.setattr(SimImages, "fetch", fetch)


async def applied(bench: Bench, **spec: Any) -> api.Operation:
    reply = await bench.apply(image("disk", **spec))
    return await bench.final(reply.results[0].operation_id)


async def half_fetched(bench: Bench) -> None:
    await bench.apply(image("disk", disk=REMOTE))
    await bench.until("phase=Importing", "disk", "Image")
    with anyio.fail_after(10):
        while bench.get("Image", "disk").status.progress != "disk 50%":
            await anyio.sleep(0.1)


@simulated
async def test_an_image_with_a_url_is_fetched() -> None:
    async with open_bench() as bench:
        assert (await applied(bench, disk=REMOTE)).state is api.OperationState.SUCCEEDED
        status = bench.get("Image", "disk").status
        assert (status.phase, status.disk.sha256, status.progress) == ("Ready", SHA256, "")


@simulated
async def test_a_download_shows_how_far_it_is_and_a_deletion_stops_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = SlowNetwork(monkeypatch)
    async with open_bench() as bench:
        await half_fetched(bench)
        await bench.delete("Image", "disk")
        await bench.until("deleted", "disk", "Image")
        assert slow.cancelled
        assert not bench.machine.host.artifacts


@simulated
async def test_another_spec_stops_the_download_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = SlowNetwork(monkeypatch)
    async with open_bench() as bench:
        await half_fetched(bench)
        local = {"path": "/disk", "sha256": "e" * 64, "format": "raw"}
        assert (await applied(bench, disk=local)).state is api.OperationState.SUCCEEDED
        assert slow.cancelled
        assert set(bench.machine.host.artifacts) == {"e" * 64}


@simulated
async def test_a_url_that_is_not_there_fails_the_image_for_good() -> None:
    async with open_bench() as bench:
        operation = await applied(bench, disk={**REMOTE, "url": "https://host/missing"})
        assert operation.state is api.OperationState.FAILED
        assert operation.error is not None
        assert "404" in operation.error.message


@simulated
async def test_fetch_image_pins_the_sum_and_keeps_the_url() -> None:
    async with open_bench() as bench:
        request = api.FetchImage(name="disk", url="https://host/disk.raw", requester="test")
        reply = await bench.engine.import_image(request)
        await bench.final(reply.operation_id)
        spec = bench.get("Image", "disk").spec
        assert (spec.disk.url, spec.disk.path) == ("https://host/disk.raw", "")
        assert spec.disk.sha256 == reply.sha256


@simulated
async def test_what_was_only_uploaded_is_asked_for_where_it_is_missing() -> None:
    async with open_bench() as bench:
        await bench.apply(image("disk", disk={"sha256": SHA256, "format": "raw"}))
        with anyio.fail_after(10):
            while (status := bench.get("Image", "disk").status) is None or not any(
                "chv image import" in condition.message for condition in status.conditions
            ):
                await anyio.sleep(0.1)
        bench.machine.host.artifacts[SHA256] = SimImages._put(  # what an upload would have done
            SimImages(bench.machine.host, bench.machine.chaos, 0), SHA256, "raw"
        )
        await bench.until("Ready", "disk", "Image")


@simulated
@pytest.mark.parametrize(
    "disk",
    [
        {**REMOTE, "path": "/disk"},
        {**REMOTE, "url": "ftp://host/disk"},
        {**REMOTE, "url": "https://me:secret@host/disk"},
        {**REMOTE, "url": "https://host/a b"},
    ],
)
async def test_sources_that_make_no_sense_are_refused(disk: dict[str, str]) -> None:
    async with open_bench() as bench:
        with pytest.raises(InvalidArgument):
            await bench.apply(image("disk", disk=disk))


@simulated
async def test_the_collection_takes_only_what_no_image_has() -> None:
    async with open_bench() as bench:
        await applied(bench, disk=REMOTE)
        images = SimImages(bench.machine.host, bench.machine.chaos, 0)
        images._put("f" * 64)
        dry = await bench.engine.collect_images(api.CollectImages(dry_run=True, requester="test"))
        assert dry.removed == ["f" * 64]
        assert set(bench.machine.host.artifacts) == {SHA256, "f" * 64}
        await bench.engine.collect_images(api.CollectImages(requester="test"))
        assert set(bench.machine.host.artifacts) == {SHA256}


def raw(kind: str, **spec: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"kind": kind, "spec": spec}))


@pytest.mark.parametrize("artifact", ["kernel", "initramfs", "disk"])
def test_a_path_of_the_node_is_roots_to_name(artifact: str) -> None:
    with pytest.raises(PermissionDenied, match="/etc/shadow") as caught:
        refuse_paths(raw("Image", **{artifact: {"path": "/etc/shadow", "sha256": SHA256}}))
    assert caught.value.field == f"spec.{artifact}.path"


@pytest.mark.parametrize(
    "fine",
    [
        raw("Image", disk={"url": "https://host/x", "sha256": SHA256}),
        raw("Image", builtin="tiny"),
        raw("Volume", disk={"path": "/etc/shadow"}),
        raw("Image", disk=7),
        msgspec.Raw(b'{"kind": 7}'),
        msgspec.Raw(b"{"),
    ],
)
def test_everything_else_is_admissions_to_judge(fine: msgspec.Raw) -> None:
    refuse_paths(fine)
