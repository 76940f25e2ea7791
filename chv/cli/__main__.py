"""Entry point of `chv`: parses arguments, imports the one module that is needed, maps errors.

Exit codes: 0 done; 2 bad input; 4 not found; 5 conflict or in use; 6 not possible here or now;
8 out of resources; 9 deadline passed; 10 outcome unknown; 11 data loss; 69 no agent; 70 bug;
77 not allowed; 130 interrupted. `chv ssh` passes the remote command's own code through.
"""

from __future__ import annotations

import importlib
import os
import sys

from chv.cli.parser import build_parser
from chv.common.errors import ChvError

EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    ours, remote = split_remote(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(ours)
    if remote is not None:
        arguments.command = remote
    module, function = arguments.handler.split(":")
    handler = getattr(importlib.import_module(f"chv.cli.commands.{module}"), function)
    try:
        return int(handler(arguments) or 0)
    except ChvError as error:
        print(f"chv: {error.code}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has left. Nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def split_remote(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """Cut a command line at `--`: what follows belongs to the guest and is not parsed here."""
    if "--" not in argv:
        return argv, None
    cut = argv.index("--")
    return argv[:cut], argv[cut + 1 :]


if __name__ == "__main__":
    sys.exit(main())
