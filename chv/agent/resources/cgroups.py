"""How far the kernel can hold a VM to limits of its own: cgroup v2, and what it has switched on."""

from __future__ import annotations

from pathlib import Path

from chv.agent.resources.machine import read_text
from chv.common.process import Provider
from chv.common.wire.agent_inventory import CgroupInventory

MOUNT = Path("sys/fs/cgroup")


def inventory(provider: Provider, root: Path = Path("/")) -> CgroupInventory:
    """Read the mode; what is limited is what the provider has switched on and read back."""
    mode, hierarchy = _mode(root)
    controllers = read_text(hierarchy / "cgroup.controllers").split() if hierarchy else []
    return CgroupInventory(
        mode=mode,
        hierarchy=str(hierarchy) if hierarchy else "",
        controllers=controllers,
        limits=limits_words(provider, mode, controllers),
    )


def limits_words(provider: Provider, mode: str, controllers: list[str]) -> str:
    """Say what is limited for each VM, or why nothing is."""
    limited = sorted(provider.controllers)
    if limited:
        return ", ".join(limited)
    if mode in ("none", "v1"):
        return "unsupported: no cgroup v2 hierarchy"
    if "memory" not in controllers:
        return f"unsupported: no memory controller in cgroup v2 ({mode})"
    return "unsupported: the controllers cannot be passed on to cgroups of ours"


def _mode(root: Path) -> tuple[str, Path | None]:
    base = root / MOUNT
    if (base / "cgroup.controllers").exists():
        return "v2", base
    if (base / "unified" / "cgroup.controllers").exists():
        return "hybrid", base / "unified"
    return ("v1", None) if (base / "memory").exists() else ("none", None)
