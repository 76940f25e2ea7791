"""`python -I -S -E chv/stord/proxy/__main__.py WORKER_ID LISTENER_FD BACKEND_PATH`.

Run by path, so that neither site-packages nor an import search costs memory or start time. The
id is there to be found by; the listening socket is inherited. Fails with exit code 2 and a line.
"""

import socket
import sys

if not __package__:  # started by path: make the package importable, whatever the directory
    sys.path.insert(0, __file__.rpartition("/chv/stord/proxy/")[0])

from chv.stord.proxy.relay import Proxy

ARGUMENTS = 4
EXIT_USAGE = 2


def main(argv: list[str]) -> int:
    """Serve until a signal comes."""
    if len(argv) != ARGUMENTS or not argv[2].isdigit():
        sys.stderr.write("usage: WORKER_ID LISTENER_FD BACKEND_PATH\n")
        return EXIT_USAGE
    try:
        listener = socket.socket(fileno=int(argv[2]))
        accepting = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        sys.stderr.write(f"descriptor {argv[2]}: {error}\n")
        return EXIT_USAGE
    if not accepting:
        sys.stderr.write(f"descriptor {argv[2]} does not listen\n")
        return EXIT_USAGE
    Proxy(listener, argv[3]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
