"""Columns of `chv get` and the page of `chv describe`. Takes plain JSON values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chv.cli import output
from chv.common.wire.agent import Operation

Item = dict[str, Any]
Column = tuple[str, Callable[[Item], str]]


def _path(item: Item, *keys: str, default: str = "-") -> str:
    value: Any = item
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return default if value in (None, "", []) else str(value)


def condition(item: Item, kind: str) -> str:
    """Return the status of one condition, `-` where it was never observed."""
    for entry in item.get("status", {}).get("conditions", []):
        if entry["type"] == kind:
            return str(entry["status"])
    return "-"


def _addresses(item: Item) -> str:
    interfaces = (item.get("status") or {}).get("interfaces", [])
    found = [entry.get(key, "") for entry in interfaces for key in ("address", "address6")]
    return ",".join(filter(None, found)) or "-"


def _running(item: Item, key: str, default: str) -> str:
    """Return what the VM runs with; where it does not run, what it is to start with."""
    wanted = _path(item, "spec", key, default=default)
    return _path(item, "status", "vmm", key, default=wanted)


def _size(item: Item) -> str:
    """Return what is wanted; where the guest sees less yet, that is said."""
    pending = (item.get("status") or {}).get("pendingSizeBytes")
    return _path(item, "spec", "size") + (" (pending)" if pending else "")


def _source(item: Item) -> str:
    source = item["spec"].get("source") or {}
    for kind in ("image", "snapshot", "backup"):
        if source.get(kind):
            return f"{kind}/{source[kind]}" if kind != "backup" else str(source[kind])
    return "-"


def _attached(item: Item) -> str:
    status = item.get("status") or {}
    names = [status.get("attachedTo", ""), *status.get("readers", [])]
    return ",".join(name for name in dict.fromkeys(names) if name) or "-"


def _snapshot_of(item: Item) -> str:
    spec = item["spec"]
    return f"volume/{spec['volume']}" if spec.get("volume") else f"vm/{spec['virtualMachine']}"


def _snapshot_volumes(item: Item) -> str:
    parts = (item.get("status") or {}).get("volumes", [])
    return ",".join(part["volume"] for part in parts) or "-"


def _saved_by(item: Item) -> str:
    vmm = (item.get("status") or {}).get("vmm", {})
    return f"{vmm['name']} {vmm.get('version', '')}".strip() if vmm.get("name") else "-"


def _subnets(item: Item) -> str:
    spec = item["spec"]
    return ",".join(filter(None, (spec.get("subnet"), spec.get("subnet6"))))


def _peers(rule: Item) -> str:
    peers = [*rule.get("cidrs", []), *(f"sg/{name}" for name in rule.get("securityGroups", []))]
    more = f",+{len(peers) - 2}" if len(peers) > 2 else ""
    return ",".join(peers[:2]) + more


def _rules(direction: str) -> Callable[[Item], str]:
    """Return what a group allows one way, shortened: `TCP 80 from 0.0.0.0/0`."""

    def render(item: Item) -> str:
        found = []
        for rule in item["spec"].get(direction, []):
            ports = ",".join(rule.get("ports", []))
            found.append(" ".join(filter(None, (rule["protocol"], ports, _peers(rule)))))
        more = f"; +{len(found) - 2} more" if len(found) > 2 else ""
        return "; ".join(found[:2]) + more or "-"

    return render


def _exposed(item: Item) -> str:
    """Return where it is reached: `TCP 192.0.2.7:80`."""
    spec = item["spec"]
    ports = f"{spec['port']}-{spec['endPort']}" if spec.get("endPort") else str(spec["port"])
    address = spec["addresses"][0]
    shown = f"[{address}]" if ":" in address else address
    more = f",+{len(spec['addresses']) - 1}" if len(spec["addresses"]) > 1 else ""
    return f"{spec.get('protocol', 'TCP')} {shown}:{ports}{more}"


def _target_port(item: Item) -> str:
    return str(item["spec"].get("targetPort") or item["spec"]["port"])


def _healthy(item: Item) -> str:
    """Return how many targets get connections, of how many."""
    targets = (item.get("status") or {}).get("targets", [])
    checked = item["spec"].get("healthCheck", {}).get("protocol", "None") != "None"
    good = ("healthy",) if checked else ("healthy", "unknown")
    healthy = sum(target.get("state", "unknown") in good for target in targets)
    return f"{healthy}/{len(item['spec'].get('targets', []))}"


NAME: Column = ("NAME", lambda item: _path(item, "metadata", "name"))
NAMESPACE: Column = ("NAMESPACE", lambda item: _path(item, "metadata", "namespace"))
PHASE: Column = ("PHASE", lambda item: _path(item, "status", "phase"))
AGE: Column = ("AGE", lambda item: output.age(_path(item, "metadata", "creationTimestamp")))

COLUMNS: dict[str, tuple[Column, ...]] = {
    "VirtualMachine": (
        NAME,
        PHASE,
        ("SSH", lambda item: condition(item, "SSHReady")),
        ("ADDRESS", _addresses),
        ("CPUS", lambda item: _running(item, "cpus", "1")),
        ("MEMORY", lambda item: _running(item, "memory", "256Mi")),
        ("VMM", lambda item: _path(item, "status", "vmm", "name")),
        ("RESTARTS", lambda item: _path(item, "status", "restarts", default="0")),
        AGE,
    ),
    "Volume": (
        NAME,
        PHASE,
        ("SIZE", _size),
        ("CLASS", lambda item: _path(item, "spec", "class", default="file")),
        ("FORMAT", lambda item: _path(item, "spec", "format", default="qcow2")),
        ("SOURCE", _source),
        ("ATTACHED-TO", _attached),
        ("SNAPSHOTS", lambda item: str(len((item.get("status") or {}).get("snapshots", [])))),
        ("PROGRESS", lambda item: _path(item, "status", "progress")),
        AGE,
    ),
    "VolumeSnapshot": (
        NAME,
        PHASE,
        ("OF", _snapshot_of),
        ("CONSISTENCY", lambda item: _path(item, "status", "consistency")),
        ("VOLUMES", _snapshot_volumes),
        ("PROGRESS", lambda item: _path(item, "status", "progress")),
        AGE,
    ),
    "VirtualMachineSnapshot": (
        NAME,
        PHASE,
        ("VM", lambda item: _path(item, "spec", "virtualMachine")),
        ("VMM", _saved_by),
        ("CPUS", lambda item: _path(item, "status", "cpus")),
        ("MEMORY", lambda item: _path(item, "status", "memory")),
        ("ON-DISK", lambda item: _path(item, "status", "sizeBytes")),
        ("VOLUMES", _snapshot_volumes),
        ("PROGRESS", lambda item: _path(item, "status", "progress")),
        AGE,
    ),
    "Network": (
        NAME,
        PHASE,
        ("SUBNET", _subnets),
        ("UPLINK", lambda item: _path(item, "spec", "uplink", default="NAT")),
        ("DOMAIN", lambda item: _path(item, "status", "domain")),
        ("NICS", lambda item: _path(item, "status", "nics", default="0")),
        ("NETNS", lambda item: _path(item, "status", "netns")),
        AGE,
    ),
    "SecurityGroup": (
        NAME,
        PHASE,
        ("MEMBERS", lambda item: _path(item, "status", "members", default="0")),
        ("INGRESS", _rules("ingress")),
        ("EGRESS", _rules("egress")),
        AGE,
    ),
    "Exposure": (
        NAME,
        PHASE,
        ("EXPOSES", _exposed),
        ("NETWORK", lambda item: _path(item, "spec", "network")),
        ("PORT", _target_port),
        ("HEALTHY", _healthy),
        AGE,
    ),
    "Image": (
        NAME,
        PHASE,
        ("BUILTIN", lambda item: _path(item, "spec", "builtin")),
        ("KERNEL", lambda item: _path(item, "status", "kernel", "sha256")[:12]),
        ("INITRAMFS", lambda item: _path(item, "status", "initramfs", "sha256")[:12]),
        ("DISK", lambda item: _path(item, "status", "disk", "sha256")[:12]),
        AGE,
    ),
}


def objects(kind: str, items: Sequence[Item], *, all_namespaces: bool) -> None:
    """Print the table of a kind."""
    columns = COLUMNS[kind]
    if all_namespaces:
        columns = (NAMESPACE, *columns)
    rows = [[render(item) for _, render in columns] for item in items]
    output.table([header for header, _ in columns], rows)


def describe(item: Item, operations: Sequence[Operation]) -> None:
    """Print one object for a person: what is wanted, what is, on what evidence, what was done."""
    metadata = item["metadata"]
    print(f"{item['kind']} {metadata['namespace']}/{metadata['name']}")
    print(
        f"  uid {metadata.get('uid', '-')}, generation {metadata.get('generation', 0)}, "
        f"age {output.age(metadata.get('creationTimestamp', ''))}"
    )
    if metadata.get("deletionTimestamp"):
        print(f"  being deleted since {metadata['deletionTimestamp']}")
    for section in ("labels", "annotations"):
        if metadata.get(section):
            pairs = ", ".join(f"{key}={value}" for key, value in sorted(metadata[section].items()))
            print(f"  {section} {pairs}")
    for section in ("spec", "status"):
        print(f"\n{section.capitalize()}")
        body = {
            key: value for key, value in (item.get(section) or {}).items() if key != "conditions"
        }
        _tree(body, "  ")
    _conditions((item.get("status") or {}).get("conditions", []))
    if operations:
        print("\nOperations")
        output.table(
            ["  ID", "VERB", "STATE", "REQUESTER", "AGE", "MESSAGE"],
            [
                [
                    f"  {entry.id}",
                    entry.verb,
                    entry.state,
                    entry.requester,
                    output.age(entry.created_at),
                    entry.message,
                ]
                for entry in operations
            ],
        )


def _conditions(conditions: Sequence[Item]) -> None:
    if not conditions:
        return
    print("\nConditions")
    rows = [
        [
            f"  {entry['type']}",
            entry["status"],
            entry["reason"],
            output.age(entry.get("lastTransitionTime", "")),
            output.age(entry.get("lastProbeTime", "")),
            "; ".join(filter(None, (entry.get("message"), entry.get("evidence")))),
        ]
        for entry in conditions
    ]
    output.table(["  TYPE", "STATUS", "REASON", "SINCE", "SEEN", "EVIDENCE"], rows)


def _tree(value: Any, indent: str) -> None:
    for key, entry in value.items():
        if isinstance(entry, dict) and entry:
            print(f"{indent}{key}:")
            _tree(entry, indent + "  ")
        elif isinstance(entry, list) and entry and isinstance(entry[0], dict):
            print(f"{indent}{key}:")
            for element in entry:
                parts = ", ".join(f"{name}: {_flow(inner)}" for name, inner in element.items())
                print(f"{indent}  - {parts}")
        else:
            print(f"{indent}{key}: {_flow(entry)}")


def _flow(value: Any) -> str:
    """Return a value on one line, as a manifest has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return str(value)
