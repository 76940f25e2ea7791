"""The shipped ELF: what a VMM looks for in it, and that its sources give its bytes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

from chv.probe import recipe
from chv.probe.image import ELF_PATH, sha256
from chv.probe.lines import BY_NAME

PACKAGE = ELF_PATH.parent
PT_LOAD, PT_NOTE, PHYS32_ENTRY = 1, 4, 18


def segments(data: bytes) -> list[tuple[int, ...]]:
    offset, size, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
    return [struct.unpack_from("<IIQQQQQQ", data, offset + i * size) for i in range(count)]


def test_the_elf_names_its_pvh_entry_inside_what_it_loads() -> None:
    data = ELF_PATH.read_bytes()
    assert data[:5] == b"\x7fELF\x02"
    (note,) = (segment for segment in segments(data) if segment[0] == PT_NOTE)
    name_size, size, kind = struct.unpack_from("<III", data, note[2])
    assert (name_size, size, kind) == (4, 8, PHYS32_ENTRY)
    (entry,) = struct.unpack_from("<Q", data, note[2] + 16)
    (load,) = (segment for segment in segments(data) if segment[0] == PT_LOAD)
    assert load[3] <= entry < load[3] + load[5]


def test_the_elf_is_small() -> None:
    assert ELF_PATH.stat().st_size < 64 * 1024


def test_the_digest_is_that_of_the_file() -> None:
    assert sha256() == hashlib.sha256(ELF_PATH.read_bytes()).hexdigest()


def test_the_elf_goes_into_the_wheel() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["chv.probe"] == [ELF_PATH.name]


def version(program: str, option: str) -> str:
    if shutil.which(program) is None:
        return "none"
    said = subprocess.run([program, option], capture_output=True, text=True, check=True).stdout
    return said.splitlines()[0].split()[-1]


def test_the_sources_give_the_same_bytes(tmp_path: Path) -> None:
    compiler = version(recipe.COMPILER, "-dumpfullversion")
    linker = version(recipe.LINKER, "--version")
    if (compiler, linker) != (recipe.COMPILER_VERSION, recipe.LINKER_VERSION):
        pytest.skip(
            f"needs gcc {recipe.COMPILER_VERSION} and ld {recipe.LINKER_VERSION};"
            f" here are {compiler} and {linker}"
        )
    output = tmp_path / "out.elf"
    for command in recipe.commands(PACKAGE / "guest", tmp_path, output):
        subprocess.run(command, check=True, env={"PATH": os.environ["PATH"]})
    assert output.read_bytes() == ELF_PATH.read_bytes()


def test_every_source_opens_by_saying_what_it_is() -> None:
    for path in (PACKAGE / "guest").iterdir():
        assert path.read_text().startswith("/*"), path.name


def test_no_line_of_the_sources_is_too_long() -> None:
    for path in (PACKAGE / "guest").iterdir():
        long = [line for line in path.read_text().splitlines() if len(line) > 100]
        assert not long, path.name


def test_every_line_that_the_guest_can_say_has_its_event() -> None:
    sources = "".join(path.read_text() for path in (PACKAGE / "guest").glob("*.c"))
    said = set(re.findall(r'say\("([a-z-]+) ', sources)) | {"cpu-added", "cpu-removed"}
    assert said == set(BY_NAME)


def test_every_key_that_an_event_wants_is_in_its_line() -> None:
    sources = "".join(path.read_text() for path in (PACKAGE / "guest").glob("*.c"))
    formats = re.findall(r'say\(((?:"(?:[^"\\]|\\.)*"\s*)+)', sources)
    joined = ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)) for text in formats]
    for name, kind in BY_NAME.items():
        wanted = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
        for line in (line for line in joined if line.split(" ")[0] == name):
            assert wanted - {"at_us"} <= set(re.findall(r" ([a-z0-9_]+)=", line)), line
