"""ELF headers, read from programs of the machine the test runs on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chv.common.errors import FailedPrecondition, Unsupported
from chv.guest.elf import closure, interpreter, needed


@pytest.fixture(scope="module")
def program() -> bytes:
    path = shutil.which("ls")
    assert path
    return Path(path).resolve().read_bytes()


def test_a_dynamic_program_names_its_loader_and_its_libraries(program: bytes) -> None:
    assert (interpreter(program) or "").startswith("/lib64/ld-linux")
    assert "libc.so.6" in needed(program)


def test_closure_asks_for_each_library_once_and_for_theirs(program: bytes) -> None:
    asked: list[str] = []

    def find(name: str) -> bytes:
        asked.append(name)
        found = [*Path("/lib/x86_64-linux-gnu").glob(name), *Path("/lib64").glob(name)]
        return found[0].read_bytes()

    libraries = closure([program, program], find)
    assert set(libraries) == set(asked)
    assert len(asked) == len(set(asked))
    # The C library itself asks for the loader.
    assert any(name.startswith("ld-linux") for name in libraries)


def test_a_missing_library_is_named(program: bytes) -> None:
    with pytest.raises(FailedPrecondition, match=r"lib.*\.so"):
        closure([program], lambda name: None)


def test_what_is_no_elf_file_is_unsupported() -> None:
    with pytest.raises(Unsupported):
        needed(b"#!/bin/sh\n" + bytes(100))
