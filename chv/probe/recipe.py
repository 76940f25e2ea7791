"""How `probe.elf` is built from `guest/`, as argv lists; pure.

Same compiler, same bytes: sources in the order of their names, no debug information, no build id,
no symbols, no paths. Whoever runs the commands (`nox -s probe`, the test of the shipped ELF) sees a
failed one by its exit status. Another compiler builds a working probe with other bytes: compare
only where `COMPILER_VERSION` and `LINKER_VERSION` match.
"""

from __future__ import annotations

from pathlib import Path

COMPILER = "gcc"
COMPILER_VERSION = "12.2.0"
LINKER = "ld"
LINKER_VERSION = "2.40"

_FREESTANDING = (
    "-std=gnu11", "-Os", "-Wall", "-Wextra", "-Werror", "-ffreestanding", "-mgeneral-regs-only",
    "-mno-red-zone", "-mcmodel=small", "-fno-pic", "-fno-pie", "-fno-stack-protector",
    "-fcf-protection=none", "-fno-asynchronous-unwind-tables", "-fno-strict-aliasing",
    "-fno-tree-loop-distribute-patterns",
)  # fmt: skip
_LINK = ("-nostdlib", "-static", "-no-pie")
_LINKER_FLAGS = "-z,noexecstack,--build-id=none,--no-warn-rwx-segments,-s"


def sources(directory: Path) -> list[Path]:
    """Return what is compiled, in the order in which it is linked."""
    return sorted(path for path in directory.iterdir() if path.suffix in {".c", ".S"})


def _object(source: Path, build: Path) -> Path:
    return build / f"{source.name}.o"


def _compile(source: Path, build: Path) -> list[str]:
    flags = _FREESTANDING if source.suffix == ".c" else ()
    unplaced = f"-ffile-prefix-map={source.parent}=guest"
    return [COMPILER, *flags, unplaced, "-c", "-o", str(_object(source, build)), str(source)]


def commands(directory: Path, build: Path, output: Path) -> list[list[str]]:
    """Return the commands that build `output` from `directory`; objects go to `build`."""
    found = sources(directory)
    objects = [str(_object(source, build)) for source in found]
    script = f"-Wl,-T,{directory / 'link.ld'},{_LINKER_FLAGS}"
    link = [COMPILER, *_LINK, script, "-o", str(output), *objects]
    return [*(_compile(source, build) for source in found), link]
