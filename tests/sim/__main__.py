"""`python -m tests.sim --schedules N --from SEED`: long runs, with figures at the end."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.sim.schedule import run


def main() -> int:
    """Run schedules; print each failing seed with what is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--from", dest="first", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print the trace of failing seeds")
    parser.add_argument("--stop", action="store_true", help="stop at the first failing seed")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    started = time.perf_counter()
    lives = faults = kills = calls = failed = 0
    virtual_s = 0.0
    for seed in range(arguments.first, arguments.first + arguments.schedules):
        result = run(seed)
        lives, faults, kills = lives + result.lives, faults + result.faults, kills + result.kills
        calls, virtual_s = calls + result.calls, virtual_s + result.virtual_s
        if result.problems:
            failed += 1
            print(f"seed {seed}:", *result.problems[:6], sep="\n  ", flush=True)
            if arguments.trace:
                print(*result.trace, sep="\n")
            if arguments.stop:
                break
    seconds = time.perf_counter() - started
    count = arguments.schedules
    print(
        f"{count} schedules in {seconds:.1f} s = {count / seconds * 60:.0f} a minute; "
        f"{failed} failed; {kills} kills ({kills / count:.1f} each), {faults} faults "
        f"({faults / count:.1f} each), {lives} lives, {calls} calls, "
        f"{virtual_s / 3600:.1f} virtual hours"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
