"""The table's part about virtual machines. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from chv.agent.condition_words import LOOK_S, ConditionRule, Passing, Time

# The monitor is asked every 3 s, has 5 s to answer, and is asked once more by the full look.
MONITOR_S = 15.0
# A daemon is asked for its health every 2 s and has 2 s; then the VMs are looked at.
DAEMON_S = 10.0
# While SSH answers it is asked every 30 s and has 10 s.
SSH_S = 60.0

_RETRIED = "it is tried on; `chv why` shows what it waits for"
_GUEST = "the guest is asked on; a restart of the VM does without it"
_STORAGE_SILENT = {"StorageUnavailable": f"stord does not answer; within {DAEMON_S:.0f} s"}
_NETWORK_SILENT = {"NetworkUnavailable": f"nwd does not answer; within {DAEMON_S:.0f} s"}
_MONITOR_SILENT = f"the pid lives and its monitor is silent; within {MONITOR_S:.0f} s"
_IN_DOUBT = {"InDoubt": "it cannot be told whether a recorded or unrecorded VMM lives"}

VM_PHASES: Mapping[str, Passing] = {
    "Pending": Passing(120.0, _RETRIED),
    "Preparing": Passing(120.0, _RETRIED),
    "Starting": Passing(90.0, "after 60 s its VMM is ended (StartTimeout), then as for a crash"),
    "Stopping": Passing(30.0, "TERM and KILL end it; what survives KILL is tried on", asks=True),
    "Deleting": Passing(120.0, _RETRIED, asks=True),
}

VM_CONDITIONS: tuple[ConditionRule, ...] = (
    ConditionRule(
        type="VolumesReady",
        evidence="stord's lists of sessions and volumes; the sockets of the exports",
        standing=("Attached", "BackendLost", "StorageSpace"),
        passing={
            "VolumeNotReady": Passing(120.0, _RETRIED),
            "NotAttached": Passing(120.0, _RETRIED),
            "Plugging": Passing(120.0, _RETRIED),
            "Unplugging": Passing(120.0, _GUEST),
            "BackendRestarting": Passing(60.0, "BackendLost and a reset, or Attached"),
        },
        unknown=_STORAGE_SILENT,
    ),
    ConditionRule(
        type="NetworkReady",
        evidence="nwd's lists of NICs, networks and groups; the carrier of each tap",
        standing=("Attached", "TapLost"),
        passing={
            "NetworkNotReady": Passing(120.0, _RETRIED),
            "GroupNotReady": Passing(120.0, _RETRIED),
            "NotAttached": Passing(120.0, _RETRIED),
            "Plugging": Passing(120.0, _RETRIED),
            "Unplugging": Passing(120.0, _GUEST),
        },
        unknown=_NETWORK_SILENT,
    ),
    ConditionRule(
        type="VMMRunning",
        evidence="the recorded process (pid, start time, argv) and the answer of its monitor",
        stale_s=MONITOR_S,
        standing=(
            "Empty",
            "Created",
            "Running",
            "Paused",
            "Shutdown",
            "Panicked",
            "Stopped",
            "Failed",
            "GivenUp",
            "HeldByNode",
            "Queued",
            "DrainQueued",
            "NodeNotReady",
            "StartOrder",
            "StopOrder",
            "ResourcesCommitted",
        ),
        passing={
            "Starting": Passing(120.0, _RETRIED),
            "BackOff": Passing(90.0, "the VM is started again"),
            "ImageNotReady": Passing(120.0, _RETRIED),
        },
        unknown={"MonitorSilent": _MONITOR_SILENT, **_IN_DOUBT},
    ),
    ConditionRule(
        type="GuestBooted",
        evidence="the first line on the serial console, or the SSH banner, since this boot began",
        time=Time.HEARD,
        stale_s=float("inf"),  # a boot that was seen stays seen until the guest reboots
        standing=("SshBanner", "SerialLine", "NotRunning"),
        passing={"NoSignYet": Passing(300.0, "it stays False; `chv logs vm/NAME`")},
        unknown={"NotProbedYet": "the agent has not listened to this boot yet", **_IN_DOUBT},
    ),
    ConditionRule(
        type="SSHReady",
        evidence="the banner that the guest sent on port 22, asked for through nwd",
        time=Time.HEARD,
        stale_s=SSH_S,
        standing=("Banner", "NoInterface", "PortNotDeclared", "NotRunning"),
        passing={"NoBanner": Passing(300.0, "it stays False; `chv logs vm/NAME`")},
        unknown={
            "NotProbedYet": "the agent has not asked this boot yet",
            "NotHeard": f"nwd does not answer and no banner was heard for {SSH_S:.0f} s",
            **_IN_DOUBT,
        },
    ),
    ConditionRule(
        type="Paused",
        evidence="the answer of the monitor",
        stale_s=MONITOR_S,
        standing=("VcpusStand", "VcpusRun", "Asked", "NotRunning", "StorageSpace"),
        passing={"Saving": Passing(960.0, "the snapshot fails and the VM runs on")},
        unknown={"MonitorSilent": _MONITOR_SILENT, **_IN_DOUBT},
    ),
    ConditionRule(
        type="StorageLost",
        evidence="stord's list of sessions, and the resets recorded for this VMM",
        standing=("NeverLost", "Kept", "Recovered"),
        passing={
            "BackendLost": Passing(120.0, "after three failed recoveries the VMM is ended"),
            "Restarting": Passing(60.0, "Kept or BackendLost"),
        },
        unknown=_STORAGE_SILENT,
    ),
    ConditionRule(
        type="RestartRequired",
        evidence="the configuration recorded when this VMM was started, against the spec",
        time=Time.RECORD,
        stale_s=LOOK_S,
        standing=("AsStarted", "SpecChanged", "NotRunning"),
        unknown=_IN_DOUBT,
    ),
)
