"""The shipped probe: where its ELF is, which bytes it has, what it can be told.

Reads one file of the package; a package without it is a broken installation and raises
`FileNotFoundError`.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from chv.probe.command import CpuPlan, DiskPlan, NetCheck, NicPlan, ProbeCommand

__all__ = [
    "ELF_PATH", "PROTOCOL", "CpuPlan", "DiskPlan", "NetCheck", "NicPlan", "ProbeCommand", "sha256",
]  # fmt: skip

ELF_PATH = Path(__file__).resolve().parent / "probe.elf"
# What `Boot.protocol` says of an ELF that this package understands.
PROTOCOL = 1


@cache
def sha256() -> str:
    """Return the digest of the ELF."""
    return hashlib.sha256(ELF_PATH.read_bytes()).hexdigest()
