"""`python -I -S -E PROGRAM WORKER_ID LISTENER_FD BACKEND_PATH`: see `command` for PROGRAM.

Neither site-packages nor an import search costs memory or start time. The id is there to be found
by; the listening socket is inherited. Fails with exit code 2 and a line.
"""

import fcntl
import os
import socket
import sys

from chv.stord.proxy.relay import Proxy

ARGUMENTS = 4
EXIT_USAGE = 2
# Above all others: the kernel closes what a killed process had open from the last descriptor to
# the first, and a VMM that sees its connection end must find the listener ended already. Cloud
# Hypervisor connects at once, and gives its disk up where that connection breaks as well.
LISTENER_FD_MIN = 512


def main(argv: list[str]) -> int:
    """Serve until a signal comes."""
    if len(argv) != ARGUMENTS or not argv[2].isdigit():
        sys.stderr.write("usage: WORKER_ID LISTENER_FD BACKEND_PATH\n")
        return EXIT_USAGE
    try:
        listener = socket.socket(fileno=_lifted(int(argv[2])))
        accepting = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        sys.stderr.write(f"descriptor {argv[2]}: {error}\n")
        return EXIT_USAGE
    if not accepting:
        sys.stderr.write(f"descriptor {argv[2]} does not listen\n")
        return EXIT_USAGE
    Proxy(listener, argv[3]).run()
    return 0


def _lifted(fd: int) -> int:
    lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LISTENER_FD_MIN)
    os.close(fd)
    return lifted


if __name__ == "__main__":
    sys.exit(main(sys.argv))
