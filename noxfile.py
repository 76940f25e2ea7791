"""Every check of the project, one session per concern.

The sessions run in the environment that `./dev` has made: one set of packages, installed once.
`nox` alone runs the six of CI; `bench` and `long` are asked for by name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "contracts", "tests", "sim", "integration"]
nox.options.default_venv_backend = "none"
nox.options.stop_on_first_error = False

CODE = ("chv", "tests", "benchmarks", "noxfile.py")
# What CI takes of each count; the full ones are `long`.
SIM_SCHEDULES_CI = "260"
# Two files at once: every test has an instance of its own, and most of them wait for a guest.
PARALLEL = ("-n", "2", "--dist", "loadfile")
SIM_SCHEDULES_LONG = "5000"


def _python(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    session.run(sys.executable, *arguments, env=env or {}, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and the rules of structured concurrency."""
    _python(session, "-m", "ruff", "check", *CODE)
    _python(session, "-m", "ruff", "format", "--check", *CODE)
    _python(session, "-m", "flake8", *_asynchronous("chv"))


def _asynchronous(directory: str) -> list[str]:
    """Return the files that flake8-async has something to say about: it takes a second each."""
    files = sorted(Path(directory).rglob("*.py"))
    return [str(path) for path in files if "async " in path.read_text()]


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    _python(session, "-m", "mypy")


@nox.session
def contracts(session: nox.Session) -> None:
    """Who may import whom."""
    session.run("lint-imports", external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Unit and property tests."""
    _python(session, "-m", "pytest", *PARALLEL, "tests/unit", "tests/property", *session.posargs)


@nox.session
def sim(session: nox.Session) -> None:
    """The real reconciler against a simulated world: seeded kills and faults on virtual time."""
    schedules = os.environ.get("CHV_SIM_SCHEDULES", SIM_SCHEDULES_CI)
    _python(
        session, "-m", "pytest", "-n", "2", "-q", "tests/sim", *session.posargs,
        env={"CHV_SIM_SCHEDULES": schedules},
    )  # fmt: skip


@nox.session
def integration(session: nox.Session) -> None:
    """Real daemons, namespaces, storage daemons and VMs; real kills."""
    _python(
        session, "-m", "pytest", *PARALLEL, "tests/integration", "tests/crash", *session.posargs
    )


@nox.session
def probe(session: nox.Session) -> None:
    """Build the probe guest anew: the bytes in the tree, where the compiler is the same."""
    from chv.probe import recipe

    package = Path("chv/probe").resolve()
    for command in recipe.commands(
        package / "guest", Path(session.create_tmp()), package / "probe.elf"
    ):
        session.run(*command, external=True, silent=True)
    (package / "probe.elf").chmod(0o644)  # data of the package, no program of this machine
    session.log(f"{(package / 'probe.elf').stat().st_size} bytes")


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks: `nox -s bench -- --json FILE [--only AREA]`."""
    _python(
        session, "-m", "pip", "install", "-q", "--disable-pip-version-check",
        "-c", "constraints.txt", "grpcio", "protobuf",
    )  # fmt: skip
    _python(session, "-m", "benchmarks", *session.posargs)


@nox.session(name="long")
def long_(session: nox.Session) -> None:
    """Full counts of one area: `nox -s long -- AREA` (agent storage network vmm rpc).

    The 200,000 schedules take many hours: `python -m tests.sim --progress FILE --minutes M` makes
    them in as many sittings as one likes.
    """
    areas = session.posargs or ["agent"]
    for area in areas:
        _python(
            session, "-m", "pytest", *PARALLEL, *_long_paths(area),
            env={"CHV_LONG": "1", "CHV_SIM_SCHEDULES": SIM_SCHEDULES_LONG},
        )  # fmt: skip


def _long_paths(area: str) -> list[str]:
    patterns = {
        "agent": [
            "tests/sim",
            "tests/crash/test_agent_*.py",
            "tests/crash/test_guest_survival.py",
            "tests/crash/test_store_power_loss.py",
            "tests/integration/test_node_*.py",
            "tests/integration/test_lifecycles.py",
        ],
        "storage": ["tests/unit/stord", "tests/*/test_stord_*.py"],
        "network": ["tests/unit/nwd", "tests/*/test_nwd_*.py"],
        "vmm": [
            "tests/unit/vmm",
            "tests/integration/test_vmm_*.py",
            "tests/integration/test_cloud_hypervisor_*.py",
            "tests/integration/test_probe_guest*.py",
            "tests/integration/test_node_probe*.py",
            "tests/integration/test_node_snapshots.py",
            "tests/integration/test_verify.py",
            "tests/integration/test_stord_proxy*.py",
            "tests/crash/test_agent_crash_[cqs]*.py",
        ],
        "rpc": ["tests/unit/common/rpc", "tests/integration/test_rpc_*.py"],
    }
    if area not in patterns:
        raise ValueError(f"no area {area!r}: {', '.join(patterns)}")
    return [str(path) for pattern in patterns[area] for path in sorted(Path().glob(pattern))]
