"""Manifests: what a file may say, and how an error names field, value and fix."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common.errors import InvalidArgument, Unsupported
from chv.common.wire.manifest import encode, load_documents, parse
from chv.common.wire.resources import KINDS, VirtualMachine, Volume
from chv.common.wire.types import API_VERSION


def document(kind: str = "VirtualMachine", **spec: Any) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "web"}, "spec": spec}


def vm(**spec: Any) -> dict[str, Any]:
    return document(**{"boot": {"image": "tiny"}, **spec})


def refused(tree: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        parse(tree)
    return caught.value


def test_a_minimal_vm_gets_its_defaults() -> None:
    resource = parse(vm())
    assert isinstance(resource, VirtualMachine)
    assert resource.metadata.namespace == "default"
    assert resource.spec.run_strategy == "RerunOnFailure"
    assert resource.spec.guest_ports == [22]


def test_a_resource_survives_being_written_and_read() -> None:
    tree = vm(memory="512Mi", disks=[{"name": "root", "volume": "data", "readOnly": True}])
    resource = parse(tree)
    assert parse(encode(resource)) == resource


def test_raw_json_and_a_tree_are_the_same() -> None:
    raw = msgspec.Raw(msgspec.json.encode(vm()))
    assert parse(raw) == parse(vm())


@pytest.mark.parametrize(
    ("tree", "field", "value", "hint"),
    [
        (vm(memory=1024), "spec.memory", "1024", "1024Mi"),
        (vm(memory="1024"), "spec.memory", "1024", "1024Mi"),
        (vm(memory="2GiB"), "spec.memory", "2GiB", "2Gi"),
        (vm(memory="1Mi"), "spec.memory", "1Mi", "16Mi"),
        (vm(memori="1Gi"), "spec.memori", "memori", "memory"),
        (vm(cpus=0), "spec.cpus", "0", ""),
        (vm(cpus="2"), "spec.cpus", "'2'", ""),
        (vm(shutdownTimeout=30), "spec.shutdownTimeout", "30", "30s"),
        (vm(shutdownTimeout="5h"), "spec.shutdownTimeout", "5h", "1h"),
        (vm(runStrategy="Never"), "spec.runStrategy", "Never", ""),
        (vm(disks=[{"name": "a", "volum": "b"}]), "spec.disks[0].volum", "volum", "volume"),
        (vm(disks=[{"name": "a"}]), "spec.disks[0].volume", "volume", ""),
        (vm(boot={"image": "tiny", "cmdline": "a\nb"}), "spec.boot.cmdline", "\\n", ""),
        (vm(interfaces=[{"name": "e\n", "network": "n"}]), "spec.interfaces[0].name", "\\n", ""),
        (vm(guestPorts=[22, 22]), "spec.guestPorts[1]", "22", ""),
        (vm(cloudInit={"sshAuthorizedKeys": ["nonsense"]}), "sshAuthorizedKeys[0]", "nons", "ssh-"),
        (vm(cloudInit={"hostname": "a.b"}), "spec.cloudInit.hostname", "a.b", "write a"),
        (document(), "spec.boot.image", "nothing to boot", "image"),
        (document("Volume", size="10"), "spec.size", "10", "10Mi"),
        (document("Volume", size=10), "spec.size", "10", "10Gi"),
        (document("Volume", size="1000k"), "spec.size", "1000k", "1Mi"),
        (document("Volume", size="1Gi", **{"class": "zfs"}), "spec.class", "none of block", ""),
        (document("Network", subnet="10.0.0.1/24"), "spec.subnet", "10.0.0.1/24", "10.0.0.0/24"),
        (document("Network", subnet="10.0.0.0/30"), "spec.subnet", "/30", "/29"),
        (document("Network", subnet="127.0.0.0/24"), "spec.subnet", "127.0.0.0/24", "private"),
        (
            document("Network", subnet="10.0.0.0/24", gateway="10.1.0.1"),
            "spec.gateway",
            "10.1.0.1",
            "10.0.0.1",
        ),
        (document("Image"), "spec", "neither", "builtin: tiny"),
        (document("Image", builtin="huge"), "spec.builtin", "huge", ""),
        (
            document("Image", builtin="tiny", kernel={"path": "/k", "sha256": "a" * 64}),
            "spec.builtin",
            "own files",
            "leave",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_fix(
    tree: dict[str, Any], field: str, value: str, hint: str
) -> None:
    error = refused(tree)
    assert field in error.field
    assert value in error.message
    assert hint in error.hint
    assert error.resource.endswith("default/web")


@pytest.mark.parametrize("name", ["a/b", "a\nb", "a" * 300, "", "-a", "A", "ä", "web\n", 7, None])
def test_a_bad_name_is_refused_and_not_repeated_in_full(name: object) -> None:
    tree = vm()
    tree["metadata"]["name"] = name
    error = refused(tree)
    assert error.field == "metadata.name"
    assert "\n" not in error.message
    assert len(error.message) < 150


def test_duplicates_inside_a_vm_are_refused() -> None:
    disks = [{"name": "a", "volume": "v"}, {"name": "a", "volume": "w"}]
    assert refused(vm(disks=disks)).field == "spec.disks[1].name"
    disks = [{"name": "a", "volume": "v"}, {"name": "b", "volume": "v"}]
    assert refused(vm(disks=disks)).field == "spec.disks[1].volume"


def test_status_and_managed_fields_are_ignored_and_nothing_else_is() -> None:
    tree = {**vm(), "status": {"phase": 7}}
    tree["metadata"] = {"name": "web", "managedFields": [1, 2]}
    assert parse(tree).status is None
    assert refused({**vm(), "extra": 1}).field == "extra"
    tree["metadata"] = {"name": "web", "selfLink": "/x"}
    assert refused(tree).field == "metadata.selfLink"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"apiVersion": "v1"}, "apiVersion"),
        ({"kind": "Pod"}, "kind"),
        ({"metadata": None}, "metadata"),
    ],
)
def test_what_every_object_has_is_checked_first(change: dict[str, Any], field: str) -> None:
    assert refused({**vm(), **change}).field == field


def test_an_object_without_a_spec_is_refused() -> None:
    tree = vm()
    del tree["spec"]
    assert refused(tree).field == "spec"


@pytest.mark.parametrize("raw", [b"", b"[]", b"7", b"{", b"[" * 5000, b'{"a":\xff}'])
def test_what_is_not_an_object_is_refused(raw: bytes) -> None:
    refused(raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=12,
    ),
    st.sampled_from(sorted(KINDS)),
)
def test_any_spec_is_read_or_refused_with_a_field(spec: Any, kind: str) -> None:
    tree = {**document(kind), "spec": spec}
    try:
        parse(tree)
    except InvalidArgument as error:
        assert error.field


# --- YAML


def test_documents_and_lists_are_read_in_order() -> None:
    text = "a: 1\n---\n---\nkind: List\nitems:\n- b: 2\n- c: 3\n"
    assert load_documents(text) == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_yaml_has_no_surprises() -> None:
    text = "{mac: 52:54:00:12:34:56, no: no, date: 2026-01-01, octal: 010, n: ~, t: true, i: -3}"
    assert load_documents(text) == [
        {
            "mac": "52:54:00:12:34:56",
            "no": "no",
            "date": "2026-01-01",
            "octal": "010",
            "n": None,
            "t": True,
            "i": -3,
        }
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: 1\na: 2\n", "line 2"),
        ("a: &x 1\nb: *x\n", "line 2"),
        ("a: [1\n", "line 2"),
        ("1: a\n", "line 1"),
        ("a: !!python/object:os.system {}\n", "line 1"),
    ],
)
def test_bad_yaml_is_refused_with_its_line(text: str, where: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_documents(text)
    assert where in caught.value.field


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "[" * 100, "a: " + "x" * 1_000_000])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        load_documents(text)


def test_a_volume_may_be_read_from_yaml() -> None:
    text = f"apiVersion: {API_VERSION}\nkind: Volume\nmetadata: {{name: d}}\nspec: {{size: 1Gi}}\n"
    (tree,) = load_documents(text)
    assert isinstance(parse(tree), Volume)


@pytest.mark.parametrize("value", ["a\nb", "a b", "$(id)", "-rf", "\u00e9", "x" * 64, 5, None])
def test_label_values_are_those_of_kubernetes(value: Any) -> None:
    tree = vm()
    tree["metadata"]["labels"] = {"tier": value}
    assert refused(tree).field == "metadata.labels.tier"
    tree["metadata"]["labels"] = {"tier": "Web_1.0", "empty": ""}
    assert parse(tree).metadata.labels == {"tier": "Web_1.0", "empty": ""}


def test_finalizers_are_refused_rather_than_ignored() -> None:
    tree = vm()
    tree["metadata"]["finalizers"] = ["example.org/hold"]
    with pytest.raises(Unsupported) as caught:
        parse(tree)
    assert caught.value.field == "metadata.finalizers"
    tree["metadata"]["finalizers"] = []
    assert parse(tree).metadata.finalizers == []


@pytest.mark.parametrize("kind", [["VirtualMachine"], {}, {"a": 1}, None, 1, True, ""])
def test_what_is_no_kind_is_refused_whatever_it_is(kind: Any) -> None:
    assert refused({**vm(), "kind": kind}).field == "kind"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uid", "x" * 65),
        ("uid", "a\nb"),
        ("resourceVersion", "1\n"),
        ("creationTimestamp", "x" * 65),
        ("deletionTimestamp", "\x1b[2J"),
    ],
)
def test_what_the_metadata_says_of_identity_is_short_and_printable(field: str, value: str) -> None:
    tree = vm()
    tree["metadata"][field] = value
    assert refused(tree).field == f"metadata.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [("uid", "x" * 65), ("uid", "a\n"), ("kind", "x" * 64), ("apiVersion", "x" * 318)],
)
def test_an_owner_is_named_in_short_and_printable_words(field: str, value: str) -> None:
    owner = {"apiVersion": API_VERSION, "kind": "VirtualMachine", "name": "a"} | {field: value}
    tree = vm()
    tree["metadata"]["ownerReferences"] = [owner]
    assert refused(tree).field == f"metadata.ownerReferences[0].{field}"


def test_annotations_are_free_text() -> None:
    tree = vm()
    tree["metadata"]["annotations"] = {"example.org/note": "one\ntwo\n"}
    assert parse(tree).metadata.annotations == {"example.org/note": "one\ntwo\n"}
