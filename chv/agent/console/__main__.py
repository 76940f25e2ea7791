"""`python -m chv.agent.console`: the holder. Ends only when told, or with the machine.

Its memory is on every node for all its time: nothing is imported here that it can do without.
"""

from __future__ import annotations

import sys
from pathlib import Path

from chv.agent.console import without_tls

OPTIONS = ("--instance", "--run-root", "--state-root", "--worker-id")


def main() -> int:
    """Take the arguments that the agent gives (--worker-id is how it finds us) and run."""
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    if set(given) != set(OPTIONS) or len(sys.argv) != 1 + 2 * len(OPTIONS):
        print(f"chv-console: wants {' '.join(OPTIONS)}, each with a value", file=sys.stderr)
        return 2
    without_tls.import_event_loop()
    return _run(given)


def _run(given: dict[str, str]) -> int:
    import anyio

    from chv.agent.console.holder import run
    from chv.common import logs
    from chv.common.errors import Conflict
    from chv.common.layout import Layout

    logs.setup("console")  # until the thread that writes is there
    layout = Layout(given["--instance"], Path(given["--run-root"]), Path(given["--state-root"]))
    try:
        anyio.run(run, layout)
    except Conflict as error:
        logs.get("chv.console").error("console.second", error=error.message)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
