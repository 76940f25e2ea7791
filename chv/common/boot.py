"""The id of this boot of the kernel: what tells processes and devices of now from recorded ones.

Light: workers import it. A test build may pretend another boot (`CHV_BOOT_ID`); anything else that
is asked to refuses to go on, since it would take its own running VMs for those of an earlier boot.
"""

from __future__ import annotations

import os
from pathlib import Path

from chv.common.errors import FailedPrecondition

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
PRETENDED = "CHV_BOOT_ID"


def boot_id() -> str:
    """Return the kernel's random id of this boot: two records of one boot carry the same."""
    pretended = os.environ.get(PRETENDED)
    if not pretended:
        return BOOT_ID_PATH.read_text(encoding="ascii").strip()
    if os.environ.get("CHV_TEST_BUILD") != "1":
        raise FailedPrecondition(
            f"{PRETENDED} is set in something that is not a test build",
            field=PRETENDED,
            hint="unset it",
        )
    return pretended
