"""`python -m tests.sim`: long runs in parallel processes, in as many sittings as it takes.

`--schedules N --from SEED` runs schedules; with `--progress FILE` each sitting goes on where the
last one ended and the figures are of all of them. `--pairs` runs every ordered pair of crashes of
the verbs. Figures at the end; status 1 where anything was found broken.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import Pool
from pathlib import Path

import msgspec

from chv.common.files import atomic_write
from tests.sim.pairs import VERBS, all_pairs
from tests.sim.schedule import run

CHUNK = 50  # schedules between two notes of the progress
PROBLEMS_MAX = 6  # that are printed of one seed


class Figures(msgspec.Struct):
    """What was run so far; `next_seed` is the first that was not."""

    first_seed: int
    next_seed: int
    seconds: float = 0.0  # over all sittings
    schedules: int = 0
    kills: int = 0
    faults: int = 0
    lives: int = 0
    calls: int = 0
    virtual_s: float = 0.0
    failed: list[int] = msgspec.field(default_factory=list)

    def add(self, other: Figures) -> None:
        """Take in what comes next."""
        for name in ("schedules", "kills", "faults", "lives", "calls", "virtual_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failed += other.failed
        self.next_seed = other.next_seed

    def __str__(self) -> str:
        count, seconds = max(1, self.schedules), max(self.seconds, 1e-9)
        return (
            f"seeds {self.first_seed}-{self.next_seed - 1}: {self.schedules} schedules in "
            f"{self.seconds:.0f} s = {self.schedules / seconds:.1f} a second; "
            f"{len(self.failed)} failed; {self.kills} kills ({self.kills / count:.1f} each), "
            f"{self.faults} faults ({self.faults / count:.1f} each), {self.lives} lives, "
            f"{self.calls} calls, {self.virtual_s / 3600:.1f} virtual hours"
        )


def run_chunk(seeds: range) -> Figures:
    """Run schedules; print each failing seed with what is broken."""
    figures = Figures(first_seed=seeds.start, next_seed=seeds.stop)
    for seed in seeds:
        result = run(seed)
        figures.schedules += 1
        figures.lives += result.lives
        figures.faults += result.faults
        figures.kills += result.kills
        figures.calls += result.calls
        figures.virtual_s += result.virtual_s
        if result.problems:
            figures.failed.append(seed)
            print(f"seed {seed}:", *result.problems[:PROBLEMS_MAX], sep="\n  ", flush=True)
    return figures


def show(seed: int) -> int:
    """Run one schedule and print all of it."""
    result = run(seed)
    print(*result.trace, *result.problems, sep="\n")
    return 1 if result.problems else 0


@contextmanager
def pool(jobs: int) -> Iterator[Pool]:
    """Processes that say nothing but what we print; they end with us."""
    with multiprocessing.Pool(jobs, logging.disable, (logging.CRITICAL,)) as made:
        yield made


def run_schedules(arguments: argparse.Namespace) -> int:
    """Run what is left of the range, a chunk after the other."""
    progress = Path(arguments.progress) if arguments.progress else None
    figures = Figures(first_seed=arguments.first, next_seed=arguments.first)
    if progress is not None and progress.exists():
        figures = msgspec.json.decode(progress.read_bytes(), type=Figures)
    end = figures.first_seed + arguments.schedules
    starts = range(figures.next_seed, end, CHUNK)
    chunks = [range(start, min(start + CHUNK, end)) for start in starts]
    before, started = figures.seconds, time.monotonic()
    with pool(arguments.jobs) as workers:
        for done in workers.imap(run_chunk, chunks):
            figures.add(done)
            figures.seconds = before + time.monotonic() - started
            if progress is not None:
                atomic_write(progress, msgspec.json.encode(figures))
            if time.monotonic() - started > arguments.minutes * 60:
                break
            if arguments.stop and figures.failed:
                break
    print(figures)
    return 1 if figures.failed else 0


def run_verb(number: int) -> tuple[str, int, list[str]]:
    """Run all pairs of one verb; return how many runs it took and what is broken."""
    broken: list[str] = []
    runs = 0
    for count, found in all_pairs(VERBS[number]):
        runs, broken = runs + count, broken + found
    return VERBS[number].name, runs, broken


def run_pairs(arguments: argparse.Namespace) -> int:
    """Run all pairs of the named verbs, of every verb where none is named."""
    numbers = [n for n, verb in enumerate(VERBS) if verb.name in (arguments.verbs or verb.name)]
    failed = total = 0
    started = time.monotonic()
    with pool(arguments.jobs) as workers:
        for name, runs, broken in workers.imap_unordered(run_verb, numbers):
            failed, total = failed + len(broken), total + runs
            print(f"{name}: {runs} runs, {len(broken)} problems", *broken[:40], sep="\n  ")
            sys.stdout.flush()
    print(f"{total} runs in {time.monotonic() - started:.0f} s; {failed} problems")
    return 1 if failed else 0


def main() -> int:
    """Parse what is asked for, and run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--from", dest="first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--progress", default="", help="file to go on from and to note in")
    parser.add_argument("--minutes", type=float, default=1e9, help="end this sitting after so long")
    parser.add_argument("--stop", action="store_true", help="stop soon after a failing seed")
    parser.add_argument("--trace", type=int, metavar="SEED", help="show one schedule")
    parser.add_argument("--pairs", dest="verbs", nargs="*", help="pairs of crashes, of VERBS")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.trace is not None:
        return show(arguments.trace)
    if arguments.verbs is not None:
        return run_pairs(arguments)
    return run_schedules(arguments)


if __name__ == "__main__":
    sys.exit(main())
