"""Imports as users do them: the CLI and a real agent, by pipe, by URL, over an agent's death."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chv.cli.connect import client
from chv.common.errors import ResourceExhausted
from chv.common.files import free_bytes
from chv.common.wire import agent as api
from chv.images import Fetcher, ImageStore, Uploads
from tests.disks import small_tmpfs
from tests.integration.live_node import ROOT, LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need()]
CONTENT = os.urandom(1 << 20) * 24
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Ranges, and a gate in the middle of the first answer."""

    protocol_version = "HTTP/1.1"
    asked: list[str] = []
    gate = threading.Event()

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.asked.append(wanted)
        start = int(wanted[6:-1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        if wanted:
            last = len(CONTENT) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.send_header("ETag", '"v1"')
        self.end_headers()
        middle = max(start, len(CONTENT) * 3 // 4)
        try:
            self.wfile.write(CONTENT[start:middle])
            self.gate.wait(60)
            self.wfile.write(CONTENT[middle:])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""


@pytest.fixture
def node() -> Iterator[LiveNode]:
    with live_node() as running:
        yield running


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked, Handler.gate = [], threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/disk.raw"
    Handler.gate.set()
    server.shutdown()
    server.server_close()
    thread.join()


def import_stdin(node: LiveNode, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "chv.cli", "image", "import", "-", *arguments]
    environment = dict(os.environ) | node._socket()
    return subprocess.run(
        command, input=CONTENT, capture_output=True, env=environment, cwd=ROOT, check=False
    )


def stored(node: LiveNode) -> list[str]:
    return sorted(path.name for path in (node.dev.layout.images / "sha256").iterdir())


def test_images_come_by_pipe_and_go_again(node: LiveNode) -> None:
    done = import_stdin(node, "--name", "piped")
    assert done.returncode == 0, done.stderr
    assert DIGEST in done.stdout.decode()
    image = node.get("image", "piped")
    assert image["spec"]["disk"] == {"sha256": DIGEST, "format": "raw"}
    assert image["status"]["phase"] == "Ready"
    assert node.dev.layout.image(DIGEST).read_bytes() == CONTENT
    refused = import_stdin(node, "--name", "other", "--sha256", "0" * 64)
    assert refused.returncode != 0
    assert DIGEST in refused.stderr.decode()
    wrong = import_stdin(node, "--name", "other", "--format", "qcow2")
    assert wrong.returncode != 0
    assert "qcow2" in wrong.stderr.decode()
    node.cli("image", "rm", "piped")
    assert DIGEST not in stored(node)
    kept = stored(node)
    assert "removed 0 files" in node.cli("image", "gc").stdout
    assert stored(node) == kept


def test_an_upload_whose_sender_dies_leaves_nothing(node: LiveNode) -> None:
    before = stored(node)
    with client(node._socket()["CHV_SOCKET"]) as agent:
        reply, (writer,) = agent.call_fds(api.OPEN_UPLOAD, api.OpenUpload())
        os.write(writer, b"half")
        os.close(writer)
        finish = api.FinishUpload(
            upload_id=reply.upload_id, size_bytes=8, name="half", requester="test"
        )
        with pytest.raises(Exception, match="4 bytes came"):
            agent.stream(api.FINISH_UPLOAD, finish, lambda event: None)
    assert stored(node) == before


def test_a_manifest_with_a_url_survives_the_death_of_the_agent(node: LiveNode, url: str) -> None:
    manifest = {
        "apiVersion": "compute.chv.dev/v1alpha1",
        "kind": "Image",
        "metadata": {"name": "far"},
        "spec": {"disk": {"url": url, "sha256": DIGEST, "format": "raw"}},
    }
    path = node.directory / "far.json"
    path.write_text(json.dumps(manifest))
    node.cli("apply", "-f", str(path))
    data = node.dev.layout.images / "partial"
    wait_for(
        lambda: any(p.stat().st_size >= len(CONTENT) // 2 for p in data.glob("*.data")), 20, "half"
    )
    assert wait_for(lambda: node.get("image", "far")["status"].get("progress"), 10, "progress")
    node.kill("agent")
    node.up()
    Handler.gate.set()
    node.cli("wait", "image/far", "--for", "Ready", "--timeout", "60s")
    assert node.dev.layout.image(DIGEST).read_bytes() == CONTENT
    assert len(Handler.asked) >= 2
    assert list(data.iterdir()) == []


def test_an_import_by_url_outlives_its_command_and_is_cancelled_and_goes_on_later(
    node: LiveNode, url: str
) -> None:
    arguments = ["image", "import", url, "--name", "far", "--sha256", DIGEST, "--reason", "first"]
    environment = dict(os.environ) | node._socket()
    first = subprocess.Popen(
        [sys.executable, "-m", "chv.cli", *arguments],
        env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    data = node.dev.layout.images / "partial"
    wait_for(
        lambda: any(p.stat().st_size >= len(CONTENT) // 2 for p in data.glob("*.data")), 20, "half"
    )
    operation = wait_for(lambda: progressed(node), 10, "progress")
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=20)[1]
    assert first.returncode == 130
    assert f"{operation['id']} goes on" in said
    assert progressed(node)["state"] == "Running"
    node.cli("ops", "cancel", operation["id"], "--reason", "later")
    shown = node.cli("ops", "show", operation["id"]).stdout
    assert "Cancelled" in shown and "later" in shown and "first" in shown
    assert list(data.glob("*.json"))  # the point from which to go on
    Handler.gate.set()
    assert DIGEST in node.cli(*arguments).stdout
    assert Handler.asked[0] == ""
    assert Handler.asked[-1].startswith("bytes=")


def progressed(node: LiveNode) -> dict[str, Any]:
    """The newest import, where it says how far it is."""
    found = json.loads(node.cli("ops", "ls", "--verb", "import", "--json").stdout)
    return found[0] if found and (found[0]["progress"] or {}).get("done") else {}


async def test_a_full_disk_ends_a_download_and_an_upload_with_nothing_left(
    tmp_path: Path, url: str
) -> None:
    import anyio

    Handler.gate.set()
    with small_tmpfs(tmp_path / "small", 8) as disk:
        store = ImageStore(disk)
        store.recover()

        async def told(done_bytes: int, total_bytes: int) -> None:
            pass

        with pytest.raises(ResourceExhausted, match=f"needs {len(CONTENT)} bytes"):
            await Fetcher(store).fetch(url, DIGEST, "raw", told)
        uploads = Uploads()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(uploads.run)
            await anyio.wait_all_tasks_blocked()
            upload_id, writer = uploads.open(store.temporary(), 1 << 30)
            with pytest.raises(BrokenPipeError):
                await anyio.to_thread.run_sync(_write_all, writer)
            with pytest.raises(ResourceExhausted, match="no space after"):
                async with uploads.finish(upload_id, len(CONTENT)):
                    pass
            tasks.cancel_scope.cancel()
        files = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_blocks]
        assert files == []
        assert free_bytes(disk) > 7 << 20


def _write_all(writer: int) -> None:
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        view = memoryview(CONTENT)
        while view:
            view = view[pipe.write(view) :]


def test_another_user_cannot_make_the_agent_read_for_him(node: LiveNode) -> None:
    """The node lets one more uid in; a file that only root can read stays root's."""
    nobody = 65534
    config = node.directory / "node.toml"
    node.down()
    config.write_text(config.read_text().replace("allow_uids = [0]", f"allow_uids = [0, {nobody}]"))
    node.up()
    secret = node.dev.layout.state / "secret"
    secret.write_bytes(CONTENT)
    secret.chmod(0o600)
    # It becomes another user once all is imported: a checkout need not be readable by others.
    code = f"""
import anyio._backends._asyncio, os, sys
from chv.cli.connect import client
from chv.common.errors import ChvError
from chv.common.wire import agent as api
os.setgroups([])
os.setgid({node.dev.layout.api.stat().st_gid})
os.setuid({nobody})
with client({node._socket()["CHV_SOCKET"]!r}) as agent:
    try:
        agent.stream(api.IMPORT_IMAGE, api.ImportImage(
            name="stolen", path={str(secret)!r}, requester="nobody"), lambda event: None)
    except ChvError as error:
        print(error.code)
    reader = agent.call_fds(api.OPEN_UPLOAD, api.OpenUpload())
    print(len(reader[1]))
    agent.call(api.PUT_KEY, api.PutKey(name="his", requester="cli:root(uid=0)"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["PERMISSION_DENIED", "1"], done.stderr
    (his,) = json.loads(node.cli("ops", "ls", "--verb", "create_key", "--json").stdout)
    assert his["requester"] == f"cli:root(uid={nobody})"
    assert DIGEST not in stored(node)
