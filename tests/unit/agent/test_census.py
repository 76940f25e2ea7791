"""The agent's own part of the census: which of what is there its records explain."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from chv.agent import census_own
from chv.agent.leak_actions import _foreign
from chv.agent.leak_records import Explained
from chv.common.evidence import process_item
from chv.common.ids import short_uid
from chv.common.layout import Layout
from chv.common.process import FoundWorker, PlainProvider
from chv.common.wire.types import CensusItem

VM, OTHER = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
SNAPSHOT = "33333333-3333-4333-8333-333333333333"


def node(tmp_path: Path) -> Layout:
    layout = Layout("abcdef", tmp_path / "run", tmp_path / "lib")
    layout.api.mkdir(parents=True)
    return layout


def seen(layout: Layout, **changes: Any) -> census_own.Seen:
    looked = census_own.look(layout, PlainProvider(layout), changes.pop("sockets", ()))
    return census_own.Seen(
        **{name: changes.get(name, getattr(looked, name)) for name in census_own.Seen.__slots__}
    )


def judged(
    layout: Layout, found: census_own.Seen, *worker_ids: str, known: tuple[str, ...] = ()
) -> dict[str, CensusItem]:
    records = Explained(frozenset(worker_ids), frozenset({VM}), frozenset({SNAPSHOT}))
    items = census_own.judge(found, layout, records, 4242, set(known))
    return {item.name: item for item in items}


def worker(worker_id: str, pid: int, uid: int = 0) -> FoundWorker:
    return FoundWorker(
        worker_id=worker_id, pid=pid, start_time=1, boot_id="b", executable="/x", uid=uid
    )


def test_directories_of_objects_that_exist_are_explained_and_others_may_be_data(
    tmp_path: Path,
) -> None:
    layout = node(tmp_path)
    for uid in (VM, OTHER):
        layout.vm(uid).mkdir(parents=True)
        layout.vm_state(uid).mkdir(parents=True)
    for uid in (SNAPSHOT, OTHER):
        layout.vm_snapshot(uid).mkdir(parents=True)
    items = judged(layout, seen(layout))
    assert items[str(layout.vm(VM))].known
    assert items[str(layout.vm(VM))].owner == VM
    assert items[str(layout.vm_state(VM))].known
    assert items[str(layout.vm_snapshot(SNAPSHOT))].known
    run, state = items[str(layout.vm(OTHER))], items[str(layout.vm_state(OTHER))]
    assert (run.known, run.data, run.owner) == (False, False, short_uid(OTHER))
    assert (state.known, state.data, state.owner) == (False, True, OTHER)
    assert items[str(layout.vm_snapshot(OTHER))].data


def test_sockets_of_the_daemons_and_of_drivers_are_explained(tmp_path: Path) -> None:
    layout = node(tmp_path)
    kept = layout.vm(VM) / "api.sock"
    kept.parent.mkdir(parents=True)
    ours = [layout.socket(name) for name in ("agent", "stord", "nwd", "console", "metrics")]
    for path in (*ours, layout.api / "odd.sock", kept):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.fspath(path))
    layout.lock("nwd").touch()
    (layout.api / "odd").touch()
    items = judged(layout, seen(layout, sockets=[kept, layout.vm(VM) / "missing"]))
    assert {name: item.known for name, item in items.items() if item.kind == "socket"} == {
        **{str(path): True for path in ours},
        str(layout.api / "odd.sock"): False,
        str(kept): True,
    }
    assert items[str(layout.lock("nwd"))].known
    assert not items[str(layout.api / "odd")].known


def test_workers_are_explained_by_their_whole_id_and_cgroups_by_its_end(tmp_path: Path) -> None:
    layout = node(tmp_path)
    ours = layout.worker_id("vmm", VM, "00000001")
    second = layout.worker_id("vmm", VM, "00000002")
    holder = layout.worker_id("console", VM, "00000003")
    theirs = layout.worker_id("qsd", VM, "00000004")
    leaves = [tmp_path / f"leaf-{number:08d}" for number in range(1, 6)]
    for leaf in leaves:
        leaf.mkdir()
    workers = [worker(ours, 1), worker(second, 2), worker(holder, 4242), worker(theirs, 3)]
    items = judged(layout, seen(layout, workers=workers, leaves=leaves), ours, known=(theirs,))
    processes = {name: item.known for name, item in items.items() if item.kind == "process"}
    assert processes == {ours: True, second: False, holder: True}  # stord tells of the last one
    cgroups = [items[str(leaf)].known for leaf in leaves]
    assert cgroups == [True, False, True, True, False]
    assert items[str(leaves[1])].identity


def test_a_process_of_another_user_is_not_ours_to_end(tmp_path: Path) -> None:
    layout = node(tmp_path)
    worker_id = layout.worker_id("vmm", VM, "00000001")
    for uid, ours in ((os.geteuid(), True), (layout.vmm_uid(3), True), (4711, False)):
        item = process_item(worker(worker_id, os.getpid(), uid), known=False)
        assert bool(_foreign(item, layout)) is not ours


def test_a_directory_with_something_explained_in_it_is_told(tmp_path: Path) -> None:
    inner = CensusItem(kind="socket", name=str(tmp_path / "d" / "x.sock"))
    assert census_own.inside(tmp_path / "d", [inner]) == inner.name
    assert census_own.inside(tmp_path / "other", [inner]) == ""
