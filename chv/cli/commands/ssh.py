"""`chv ssh`: OpenSSH with a pinned host key, over a socket that nwd opened in the guest's network.

ssh gets the connected socket by ProxyUseFdpass, so no daemon of ours carries a byte of the
session and it survives their restart. The known-hosts file is an anonymous one of this process:
nothing is left behind, whatever kills us.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys

import msgspec

from chv.cli import connect
from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.common.process.foreground import run_foreground
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent

HOST_ALIAS = "chv-guest"


def ssh(arguments: argparse.Namespace) -> int:
    """Run ssh; return its exit code, which is the remote command's."""
    socket = connect.find_socket(arguments.socket)
    target = agent.ObjectRef(
        kind="VirtualMachine", name=arguments.name, namespace=arguments.namespace
    )
    with connect.client(arguments.socket) as client:
        access = client.call(agent.GET_GUEST_ACCESS, target)
        _require_running(client, target)
    identity = arguments.identity or access.identity_file
    if not os.access(identity, os.R_OK):
        raise FailedPrecondition(
            f"cannot read the key {identity}", hint="run as root, or give your own key with -i"
        )
    known_hosts = os.memfd_create("known_hosts")
    os.write(known_hosts, f"{HOST_ALIAS} {access.host_key}\n".encode())
    proxy = [
        sys.executable, "-m", "chv.cli.fdpass", "--socket", str(socket),
        "--namespace", arguments.namespace, "--port", str(arguments.port), arguments.name,
    ]  # fmt: skip
    options = {
        "UserKnownHostsFile": f"/proc/{os.getpid()}/fd/{known_hosts}",
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "HostKeyAlias": HOST_ALIAS,
        "ProxyUseFdpass": "yes",
        "ProxyCommand": shlex.join(proxy),
        "IdentitiesOnly": "yes",
        "UpdateHostKeys": "no",
        # A guest that was killed or reset says no goodbye: without these the session would hang.
        "ServerAliveInterval": "10",
        "ServerAliveCountMax": "6",
        "LogLevel": "ERROR",
    }
    argv = ["ssh", "-F", "none", "-i", identity]
    for key, value in options.items():
        # ssh reads % as the start of a token.
        argv += ["-o", f"{key}={value.replace('%', '%%') if key == 'ProxyCommand' else value}"]
    argv += ["-l", _user(arguments.user or access.user), HOST_ALIAS]
    if arguments.command:
        argv += ["--", *arguments.command]
    return run_foreground(tuple(argv))


def _require_running(client: BlockingClient, target: agent.ObjectRef) -> None:
    """Say what is wrong here rather than let ssh say that nothing answers."""
    status = msgspec.json.decode(client.call(agent.GET, target).object).get("status") or {}
    phase = status.get("phase", "Pending")
    if phase not in ("Running", "Unknown"):
        raise FailedPrecondition(
            f"VM {target.name} is {phase}", hint=f"`chv start {target.name}`, or `chv describe vm`"
        )


def _user(name: str) -> str:
    if name.startswith("-") or not name.isprintable() or " " in name:
        raise InvalidArgument(f"{name!r} is not a login name", field="--user")
    return name
