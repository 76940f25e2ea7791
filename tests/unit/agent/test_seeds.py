"""Seed disks: one host key for a VM's life, nothing readable by others, nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chv.agent.ports import SeedRequest, VmHandle
from chv.agent.seeds import Seeds
from chv.common.layout import Layout

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other uids: needs root")

VM = VmHandle(uid="11111111-1111-4111-8111-111111111111", namespace="default", name="a", slot=3)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout("aaaaaa", tmp_path / "run", tmp_path / "state")
    made.vm_state(VM.uid).mkdir(parents=True)
    return made


async def test_host_key_stays_when_the_seed_is_made_again(layout: Layout) -> None:
    first = await Seeds(layout).ensure(VM, SeedRequest(hostname="a"))
    again = await Seeds(layout).ensure(VM, SeedRequest(hostname="renamed"))
    assert again.host_key_public == first.host_key_public
    assert first.host_key_public.startswith("ssh-ed25519 ")


async def test_seed_belongs_to_the_vm_and_keys_to_root_alone(layout: Layout) -> None:
    seed = await Seeds(layout).ensure(VM, SeedRequest(hostname="a"))
    status = Path(seed.path).stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, layout.vmm_uid(VM.slot))
    for private in (layout.vm_state(VM.uid) / "ssh_host_ed25519_key",
                    Seeds(layout).operator_identity):  # fmt: skip
        status = private.stat()
        assert (status.st_mode & 0o777, status.st_uid) == (0o600, 0)


async def test_seed_lets_the_operator_and_the_users_keys_in(layout: Layout) -> None:
    users = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGfmHB0bWm0mBq0t5CRjYlVFuyWkZAEGUMU4MzTZvjQk me"
    seeds = Seeds(layout)
    seed = await seeds.ensure(VM, SeedRequest(hostname="a", ssh_authorized_keys=(users,)))
    content = Path(seed.path).read_bytes()
    assert users.encode() in content
    assert seeds.operator_key().public.encode() in content


async def test_interrupted_key_making_is_made_whole(layout: Layout) -> None:
    directory = layout.vm_state(VM.uid)
    (directory / "ssh_host_ed25519_key.pub").write_text("ssh-ed25519 left-by-a-kill\n")
    seed = await Seeds(layout).ensure(VM, SeedRequest(hostname="a"))
    public = (directory / "ssh_host_ed25519_key.pub").read_text().strip()
    assert public == seed.host_key_public


async def test_remove_leaves_no_key_and_may_be_repeated(layout: Layout) -> None:
    seeds = Seeds(layout)
    await seeds.ensure(VM, SeedRequest(hostname="a"))
    await seeds.remove(VM)
    await seeds.remove(VM)
    assert list(layout.vm_state(VM.uid).iterdir()) == []
