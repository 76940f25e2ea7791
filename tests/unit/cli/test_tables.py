"""What `chv describe` prints."""

from __future__ import annotations

import pytest

from chv.cli import tables


def test_describe_shows_labels_and_annotations(capsys: pytest.CaptureFixture[str]) -> None:
    metadata = {
        "name": "a",
        "namespace": "default",
        "labels": {"tier": "front", "app": "x"},
        "annotations": {"note": "y"},
    }
    tables.describe({"kind": "Network", "metadata": metadata}, [])
    printed = capsys.readouterr().out
    assert "  labels app=x, tier=front\n" in printed
    assert "  annotations note=y\n" in printed


def test_a_running_vm_is_listed_with_what_it_runs_with(capsys: pytest.CaptureFixture[str]) -> None:
    metadata = {
        "name": "a",
        "namespace": "default",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    wanted = {"metadata": metadata, "spec": {"cpus": 4, "memory": "1Gi"}}
    running = {**wanted, "status": {"vmm": {"cpus": 2, "memory": "512Mi"}}}
    tables.objects("VirtualMachine", [running, wanted], all_namespaces=False)
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[4:6] == ["2", "512Mi"]
    assert second.split()[4:6] == ["4", "1Gi"]


def test_describe_shows_what_a_condition_says_and_rests_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    condition = {
        "type": "RestartRequired",
        "status": "True",
        "reason": "SpecChanged",
        "message": "cpus: 1 run, 2 wanted",
        "evidence": "started from generation 1",
    }
    status = {"conditions": [condition]}
    metadata = {"name": "a", "namespace": "default"}
    tables.describe({"kind": "VirtualMachine", "metadata": metadata, "status": status}, [])
    assert "cpus: 1 run, 2 wanted; started from generation 1" in capsys.readouterr().out


def test_describe_shows_a_spec_as_a_manifest_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    metadata = {"name": "a", "namespace": "default"}
    spec = {"metadata": True, "rules": [{"ports": ["80"], "rate": {"egress": "1Mbit"}}]}
    tables.describe({"kind": "Network", "metadata": metadata, "spec": spec}, [])
    shown = capsys.readouterr().out
    assert "metadata: true" in shown
    assert "- ports: [80], rate: {egress: 1Mbit}" in shown


@pytest.mark.parametrize(
    ("check", "states"),
    [({}, ["unknown", "absent"]), ({"protocol": "TCP"}, ["healthy", "unknown"])],
)
def test_targets_that_nobody_checks_count_as_healthy(
    check: dict[str, str], states: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {
        "network": "lan", "addresses": ["192.0.2.1"], "port": 80, "healthCheck": check,
        "targets": [{"virtualMachine": "a"}, {"virtualMachine": "b"}],
    }  # fmt: skip
    metadata = {
        "name": "x", "namespace": "default", "creationTimestamp": "2026-01-01T00:00:00Z"
    }  # fmt: skip
    status = {"targets": [{"state": state} for state in states]}
    item = {"metadata": metadata, "spec": spec, "status": status}
    tables.objects("Exposure", [item], all_namespaces=False)
    assert "1/2" in capsys.readouterr().out
