"""Downloads from a real server on the loopback, with everything that goes wrong there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

from chv.common.errors import ChvError, InvalidArgument, ResourceExhausted, Unavailable
from chv.images import Fetcher, ImageStore
from chv.images import download as download_module
from chv.images import partials as partials_module
from chv.images.download import check_url
from chv.images.partials import Partial, PartialRecord
from tests.unit.images.web import Site, serving

CONTENT = bytes(range(256)) * 12_288  # 3 MiB
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    made = ImageStore(tmp_path / "images")
    made.recover()
    return made


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving(Site(CONTENT)) as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partials_module, "CHECKPOINT_BYTES", 1 << 20)


class Told:
    """Progress as it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    async def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self.seen.append((done_bytes, total_bytes))


def leftovers(store: ImageStore) -> list[str]:
    return sorted(path.name for path in store.partials.iterdir())


def debris(store: ImageStore) -> list[Path]:
    return [path for path in store.path(DIGEST).parent.iterdir() if path.name != DIGEST]


async def test_a_file_is_fetched_verified_and_stored_with_progress(
    store: ImageStore, site: Site
) -> None:
    told = Told()
    artifact = await Fetcher(store).fetch(site.url, DIGEST, "raw", told)
    assert artifact.sha256 == DIGEST
    assert store.path(DIGEST).read_bytes() == CONTENT
    assert store.path(DIGEST).stat().st_mode & 0o777 == 0o444
    assert told.seen[0] == (0, len(CONTENT))
    assert told.seen[-1] == (len(CONTENT), len(CONTENT))
    assert leftovers(store) == []


async def test_what_is_stored_is_not_fetched_again(store: ImageStore, site: Site) -> None:
    fetcher = Fetcher(store)
    await fetcher.fetch(site.url, DIGEST, "raw", Told())
    await fetcher.fetch(site.url, DIGEST, "raw", Told())
    assert len(site.asked) == 1


async def test_two_who_want_the_same_file_fetch_it_once(store: ImageStore, site: Site) -> None:
    fetcher = Fetcher(store)
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(fetcher.fetch, site.url, DIGEST, "raw", Told())
    assert len(site.asked) == 1


async def test_a_break_goes_on_where_it_was_with_the_validator(
    store: ImageStore, site: Site
) -> None:
    site.break_after = [1 << 20, 1 << 20]
    await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())
    assert store.path(DIGEST).read_bytes() == CONTENT
    assert len(site.asked) == 3
    assert [asked.get("if-range") for asked in site.asked] == [None, '"one"', '"one"']
    starts = [int(asked["range"][6:-1]) for asked in site.asked[1:]]
    assert 0 < starts[0] < starts[1] < len(CONTENT)


async def test_a_cancelled_download_is_taken_up_by_the_next(store: ImageStore, site: Site) -> None:
    site.break_after = [2 << 20]
    with anyio.CancelScope() as scope:

        async def stop(done_bytes: int, total_bytes: int) -> None:
            if done_bytes >= 1 << 20:
                scope.cancel()

        await Fetcher(store).fetch(site.url, DIGEST, "raw", stop)
    assert scope.cancelled_caught
    assert [Path(name).suffix for name in leftovers(store)] == [".data", ".json"]
    site.break_after = []
    told = Told()
    await Fetcher(store).fetch(site.url, DIGEST, "raw", told)
    assert told.seen[0][0] >= 1 << 20
    assert store.path(DIGEST).read_bytes() == CONTENT
    assert leftovers(store) == []


async def test_another_version_on_the_server_is_fetched_from_the_start(
    store: ImageStore, site: Site
) -> None:
    site.break_after = [1 << 20]
    site.on_part = lambda: setattr(site, "etag", '"two"')
    await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())
    assert store.path(DIGEST).read_bytes() == CONTENT


async def test_a_server_without_ranges_is_asked_for_all_again(
    store: ImageStore, site: Site
) -> None:
    site.ranges, site.break_after = False, [1 << 20]
    await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())
    assert store.path(DIGEST).read_bytes() == CONTENT


async def test_a_length_that_nobody_told_is_no_problem(store: ImageStore, site: Site) -> None:
    site.length = False
    told = Told()
    await Fetcher(store).fetch(site.url, DIGEST, "raw", told)
    assert {total for _, total in told.seen} == {0}


async def test_only_what_was_synced_is_gone_on_from(store: ImageStore, site: Site) -> None:
    """A power loss may leave zeros beyond the last point that was made durable."""
    partial = Partial(store.partials, site.url, DIGEST)
    partial.open()
    partial.begin('"one"', len(CONTENT))
    partial.write(CONTENT[: 1 << 20])
    partial.write(bytes(1 << 19))  # less than a checkpoint apart: these bytes are lies
    partial.close()
    await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())
    assert site.asked[0]["range"] == f"bytes={1 << 20}-"
    assert store.path(DIGEST).read_bytes() == CONTENT


async def test_a_mix_of_two_versions_is_noticed_and_fetched_anew(
    store: ImageStore, site: Site
) -> None:
    site.etag = ""
    partial = Partial(store.partials, site.url, DIGEST)
    partial.open()
    partial.begin("", len(CONTENT))
    partial.write(b"old!" * (1 << 18))
    partial.checkpoint()
    partial.close()
    await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())
    assert [asked.get("range") for asked in site.asked] == [f"bytes={1 << 20}-", None]
    assert store.path(DIGEST).read_bytes() == CONTENT


async def test_a_whole_partial_file_needs_no_byte_more(store: ImageStore, site: Site) -> None:
    partial = Partial(store.partials, site.url, DIGEST)
    partial.open()
    partial.begin('"one"', len(CONTENT))
    partial.write(CONTENT)
    partial.checkpoint()
    partial.close()
    told = Told()
    assert (await Fetcher(store).fetch(site.url, DIGEST, "raw", told)).sha256 == DIGEST
    assert told.seen == []


async def test_a_wrong_sum_names_both_and_leaves_nothing(store: ImageStore, site: Site) -> None:
    wrong = "0" * 64
    with pytest.raises(InvalidArgument, match=DIGEST) as caught:
        await Fetcher(store).fetch(site.url, wrong, "raw", Told())
    assert wrong in caught.value.message
    assert leftovers(store) == []
    assert debris(store) == []


async def test_a_wrong_format_leaves_nothing(store: ImageStore, site: Site) -> None:
    with pytest.raises(InvalidArgument, match="qcow2"):
        await Fetcher(store).fetch(site.url, DIGEST, "qcow2", Told())
    assert leftovers(store) == []
    assert store.get(DIGEST) is None


@pytest.mark.parametrize(
    ("statuses", "error"),
    [([404], InvalidArgument), ([403], InvalidArgument), ([503] * 9, Unavailable)],
)
async def test_a_refusal_of_the_server_is_final_or_not(
    store: ImageStore, site: Site, statuses: list[int], error: type[ChvError]
) -> None:
    site.statuses = statuses
    with pytest.raises(error, match=str(statuses[0])) as caught:
        await Fetcher(store).fetch(f"{site.url}?token=hidden", DIGEST, "raw", Told())
    assert "hidden" not in str(caught.value)


async def test_a_server_that_recovers_is_asked_again(store: ImageStore, site: Site) -> None:
    site.statuses = [503, 429]
    assert (await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())).sha256 == DIGEST


async def test_nobody_who_listens_is_unavailable(store: ImageStore) -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        await Fetcher(store).fetch("http://127.0.0.1:1/x", DIGEST, "raw", Told())


async def test_a_redirect_is_followed_and_a_circle_ends(store: ImageStore, site: Site) -> None:
    async with serving(Site(b"", location=site.url)) as front:
        assert (await Fetcher(store).fetch(front.url, DIGEST, "raw", Told())).sha256 == DIGEST
    async with serving(Site(b"")) as circle:
        circle.location = circle.url
        with pytest.raises(InvalidArgument, match="redirects"):
            await Fetcher(store).fetch(circle.url, "1" * 64, "raw", Told())
        assert len(circle.asked) == download_module.REDIRECTS_MAX + 1


async def test_a_redirect_to_a_file_of_the_node_is_refused(store: ImageStore) -> None:
    async with serving(Site(b"", location="file:///etc/shadow")) as front:
        with pytest.raises(InvalidArgument, match="not an http"):
            await Fetcher(store).fetch(front.url, DIGEST, "raw", Told())


async def test_an_encoded_answer_is_refused(store: ImageStore, site: Site) -> None:
    site.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(InvalidArgument, match="encoded"):
        await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())


async def test_more_than_the_limit_is_refused(
    store: ImageStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "SIZE_BYTES_MAX", 1 << 20)
    for length in (True, False):
        site.length = length
        with pytest.raises(InvalidArgument, match="at most"):
            await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())


async def test_too_little_space_is_told_before_the_first_byte(
    store: ImageStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partials_module, "free_bytes", lambda path: 1000)
    with pytest.raises(ResourceExhausted, match=f"needs {len(CONTENT)} bytes"):
        await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())


async def test_a_proxy_of_the_environment_is_not_asked(
    store: ImageStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert (await Fetcher(store).fetch(site.url, DIGEST, "raw", Told())).sha256 == DIGEST


@pytest.mark.parametrize(
    ("url", "sha256", "word"),
    [
        ("http://host/x", "", "not protected"),
        ("ftp://host/x", DIGEST, "not an http"),
        ("file:///etc/shadow", DIGEST, "not an http"),
        ("https:///x", DIGEST, "not an http"),
        ("https://me:secret@host/x", DIGEST, "user name"),
    ],
)
def test_what_is_not_fetched_is_refused(url: str, sha256: str, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word) as caught:
        check_url(url, sha256)
    assert "secret" not in str(caught.value)


def test_old_partial_files_go_and_young_ones_stay(store: ImageStore) -> None:
    for name, age_s in (("old", 90_000), ("young", 80_000)):
        partial = Partial(store.partials, f"https://host/{name}", "")
        partial.open()
        partial.begin("", 0)
        partial.write(b"x" * 4096)
        partial.checkpoint()
        partial.close()
        moment = partial.path.stat().st_mtime - age_s
        os.utime(partial.path, (moment, moment))
    before = leftovers(store)
    dry = store.collect(frozenset(), dry_run=True)
    assert leftovers(store) == before
    done = store.collect(frozenset(), dry_run=False)
    assert dry == done
    assert len(done.names) == 1
    assert done.freed_bytes == 4096
    records = [store.partials / name for name in leftovers(store) if name.endswith(".json")]
    urls = [msgspec.json.decode(path.read_bytes(), type=PartialRecord).url for path in records]
    assert urls == ["https://host/young"]
