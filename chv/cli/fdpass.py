"""The ProxyCommand of `chv ssh`: gets a connected socket from the agent and hands it to ssh.

ssh (ProxyUseFdpass) gave us a Unix socket as standard output and takes the descriptor from it.
"""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from chv.common.errors import ChvError
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent

CONNECT_TIMEOUT_S = 10.0


def main() -> int:
    """Connect and pass on; errors go to standard error, where ssh shows them."""
    parser = argparse.ArgumentParser(prog="chv-fdpass")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--port", type=int, default=22)
    parser.add_argument("name")
    arguments = parser.parse_args()
    request = agent.OpenGuest(
        name=arguments.name,
        namespace=arguments.namespace,
        port=arguments.port,
        timeout_s=CONNECT_TIMEOUT_S,
    )
    try:
        with BlockingClient(arguments.socket) as client:
            _, fds = client.call_fds(agent.OPEN_GUEST, request)
    except ChvError as error:
        print(f"chv: {error.code}: {error}", file=sys.stderr)
        return error.exit_code
    with socket.socket(fileno=sys.stdout.fileno()) as to_ssh:
        socket.send_fds(to_ssh, [b"\0"], fds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
