"""Which agent the CLI speaks to: a fixed order, and no guessing."""

from __future__ import annotations

from pathlib import Path

import pytest

from chv.cli import connect
from chv.common.errors import InvalidArgument, Unavailable


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHV_SOCKET", raising=False)
    monkeypatch.setattr(connect, "RUN_ROOT", tmp_path / "run")
    return tmp_path


def make_instance(base: Path, name: str) -> Path:
    api = base / "run" / name / "api"
    api.mkdir(parents=True)
    (api / "agent.sock").touch()
    return api / "agent.sock"


def test_no_node_says_how_to_start_one(nowhere: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        connect.find_socket(None)
    assert "chv up" in caught.value.hint


def test_only_instance_is_taken(nowhere: Path) -> None:
    made = make_instance(nowhere, "aaaaaa")
    assert connect.find_socket(None) == made


def test_several_instances_are_listed_and_none_is_taken(nowhere: Path) -> None:
    paths = [make_instance(nowhere, name) for name in ("aaaaaa", "bbbbbb")]
    with pytest.raises(InvalidArgument) as caught:
        connect.find_socket(None)
    assert all(str(path) in caught.value.message for path in paths)


def test_pointer_beats_instances_environment_beats_pointer_argument_beats_all(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_instance(nowhere, "aaaaaa")
    (nowhere / ".chv").mkdir()
    (nowhere / ".chv" / "socket").write_text("/from/pointer\n")
    assert connect.find_socket(None) == Path("/from/pointer")
    monkeypatch.setenv("CHV_SOCKET", "/from/environment")
    assert connect.find_socket(None) == Path("/from/environment")
    assert connect.find_socket("/from/argument") == Path("/from/argument")


def test_requester_names_user_and_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ada")
    assert connect.requester().startswith("cli:ada(uid=")
