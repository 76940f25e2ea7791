"""Bad input on a real node: each a clear error with field, value and fix, and nothing half-made."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.live_node import HELLO, LiveNode, live_node, need

pytestmark = [pytest.mark.root, need()]

NETWORK = """
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {{name: {name}}}
spec: {{subnet: {subnet}}}
"""
VM = """
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {{name: {name}}}
spec: {spec}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake") as running:
        yield running


def refuse(node: LiveNode, tmp_path: Path, text: str, *words: str, code: int = 2) -> None:
    """Apply `text`; it must fail with all `words`, and no object may have come of it."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    before = everything(node)
    done = node.cli("apply", "-f", str(path), check=False)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert everything(node) == before


def everything(node: LiveNode) -> list[str]:
    found = []
    for kind in ("image", "network", "volume", "vm"):
        items = json.loads(node.cli("get", kind, "-A", "-o", "json").stdout or "[]")
        found += [f"{kind}/{item['metadata']['name']}" for item in items]
    return found


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{memmory: 1Gi}", ("INVALID_ARGUMENT", "memmory")),
        ("{memory: 1024}", ("spec.memory", "1024", "1024Mi")),
        ("{memory: 1 Gi}", ("spec.memory",)),
        ("{memory: '-1Gi'}", ("spec.memory",)),
        ("{cpus: 0}", ("spec.cpus",)),
        ("{cpus: two}", ("spec.cpus",)),
        ("{boot: {image: nowhere}}", ("spec.boot.image", "nowhere")),
        ("{disks: [{name: a, volume: nowhere}]}", ("volume", "nowhere")),
        ("{runStrategy: Sometimes}", ("spec.runStrategy", "Sometimes")),
        ("{shutdownTimeout: 5}", ("spec.shutdownTimeout",)),
        ("{guestPorts: [70000]}", ("spec.guestPorts",)),
    ],
)
def test_bad_vm_spec_is_refused(
    node: LiveNode, tmp_path: Path, spec: str, words: tuple[str, ...]
) -> None:
    refuse(node, tmp_path, VM.format(name="bad", spec=spec), *words)


@pytest.mark.parametrize(
    "name", ["a/b", '"a\\n"', "x" * 300, "Big", "-a", "a_b", "''", "..", "1.2"]
)
def test_bad_name_is_refused(node: LiveNode, tmp_path: Path, name: str) -> None:
    refuse(node, tmp_path, VM.format(name=name, spec="{}"), "metadata.name")


def test_missing_network_is_named(node: LiveNode, tmp_path: Path) -> None:
    volume = "apiVersion: compute.chv.dev/v1alpha1\nkind: Volume\nmetadata: {name: spare}\n"
    spec = "{disks: [{name: d, volume: spare}], interfaces: [{name: a, network: nowhere}]}"
    text = f"{volume}spec: {{size: 1Mi}}\n---{VM.format(name='bad', spec=spec)}"
    refuse(node, tmp_path, text, "spec.interfaces", "nowhere")


def test_duplicate_in_one_file_is_refused(node: LiveNode, tmp_path: Path) -> None:
    one = VM.format(name="twin", spec="{}")
    refuse(node, tmp_path, f"{one}---{one}", "twin")


def test_one_bad_object_stops_all_of_the_file(node: LiveNode, tmp_path: Path) -> None:
    good = NETWORK.format(name="fine", subnet="10.20.0.0/24")
    bad = VM.format(name="bad", spec="{memory: 1024}")
    refuse(node, tmp_path, f"{good}---{bad}", "spec.memory")


@pytest.mark.parametrize(
    ("subnet", "words"),
    [
        ("198.18.0.0/16", ("spec.subnet", "198.18.0.0")),  # the sandbox's uplink
        ("198.18.0.128/25", ("spec.subnet",)),
        ("127.0.0.0/16", ("spec.subnet",)),
        ("169.254.64.0/24", ("spec.subnet",)),
        ("10.1.2.3/24", ("spec.subnet", "10.1.2.0/24")),
        ("10.1.2.0/33", ("spec.subnet",)),
        ("not-a-subnet", ("spec.subnet",)),
    ],
)
def test_bad_subnet_is_refused(
    node: LiveNode, tmp_path: Path, subnet: str, words: tuple[str, ...]
) -> None:
    refuse(node, tmp_path, NETWORK.format(name="bad", subnet=subnet), *words)


def test_wrong_checksum_is_refused_and_leaves_nothing(node: LiveNode, tmp_path: Path) -> None:
    image = tmp_path / "disk.raw"
    image.write_bytes(b"\0" * (1 << 20))
    before = everything(node)
    wrong = "0" * 64
    done = node.cli(
        "image", "import", str(image), "--name", "wrong", "--sha256", wrong, check=False
    )
    assert done.returncode == 2
    assert wrong in done.stderr
    assert hashlib.sha256(image.read_bytes()).hexdigest() in done.stderr
    assert everything(node) == before
    assert stored(node) == []


def stored(node: LiveNode) -> list[str]:
    directory = node.dev.layout.images / "sha256"
    return [path.name for path in directory.iterdir()] if directory.exists() else []


def test_missing_file_is_named(node: LiveNode) -> None:
    done = node.cli("image", "import", "/nowhere/disk.raw", "--name", "none", check=False)
    assert done.returncode in (2, 4)
    assert "/nowhere/disk.raw" in done.stderr


def test_raw_image_that_is_qcow2_is_refused(node: LiveNode, tmp_path: Path) -> None:
    image = tmp_path / "disk.img"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(image), "16M"], check=True)
    done = node.cli("image", "import", str(image), "--name", "liar", "--format", "raw", check=False)
    assert done.returncode == 2
    assert "qcow2" in done.stderr


def test_qcow2_with_a_backing_file_is_refused(node: LiveNode, tmp_path: Path) -> None:
    image = tmp_path / "disk.img"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-u", "-b", "/etc/shadow", "-F", "raw",
         str(image), "16M"],
        check=True,
    )  # fmt: skip
    done = node.cli(
        "image", "import", str(image), "--name", "thief", "--format", "qcow2", check=False
    )
    assert done.returncode == 2
    assert "backing" in done.stderr


def test_full_disk_during_import_is_told_and_leaves_nothing(node: LiveNode, tmp_path: Path) -> None:
    image = tmp_path / "disk.raw"
    with image.open("wb") as stream:
        for number in range(48):
            stream.write(bytes([number + 1]) * (1 << 20))
    images = node.dev.layout.images
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(images)], check=True)
    try:
        done = node.cli("image", "import", str(image), "--name", "large", check=False)
        assert done.returncode == 8, done.stderr
        assert "RESOURCE_EXHAUSTED" in done.stderr
        assert stored(node) == []
    finally:
        subprocess.run(["umount", str(images)], check=True)
    # Space is back: the same import works, and the image goes again.
    node.cli("image", "import", str(image), "--name", "large")
    assert stored(node) == [hashlib.sha256(image.read_bytes()).hexdigest()]
    node.cli("image", "rm", "large")
    assert stored(node) == []


def test_verbs_on_unknown_objects_say_not_found(node: LiveNode) -> None:
    for arguments in (
        ("start", "nobody"), ("stop", "nobody"), ("reset", "nobody"), ("ssh", "nobody"),
        ("get", "vm", "nobody"), ("delete", "vm", "nobody"), ("logs", "vm/nobody"),
        ("ops", "show", "op-000000000000"),
    ):  # fmt: skip
        done = node.cli(*arguments, check=False)
        assert done.returncode == 4, (arguments, done.stderr)


def test_dry_run_changes_nothing(node: LiveNode) -> None:
    before = everything(node)
    shown = node.cli("apply", "--dry-run", "-f", str(HELLO)).stdout
    assert "VirtualMachine/hello created (dry run)" in shown
    assert everything(node) == before


def test_wait_for_what_never_comes_ends_at_its_deadline(node: LiveNode, tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text(NETWORK.format(name="waited", subnet="10.21.0.0/24"))
    node.cli("apply", "-f", str(tmp_path / "net.yaml"), "--wait")
    done = node.cli(
        "wait", "network/waited", "--for", "phase=Failed", "--timeout", "1s", check=False
    )
    assert done.returncode == 9
    node.cli("delete", "network", "waited")
