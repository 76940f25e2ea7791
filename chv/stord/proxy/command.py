"""How stord starts a proxy: its program, its command line, the listener that it is given.

The only module of the package that the rest of stord imports, and that the proxy does not. The
proxy runs under the VM's storage uid, which may not be able to read the place that CHV runs from
(a checkout in a home directory), so its few modules are put, compiled, into one archive that
everybody may read, and the system's interpreter runs them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import socket
import stat
import sys
import zipfile
from functools import cache
from pathlib import Path

from chv.common.files import atomic_write

WORKER_KIND = "proxy"
LISTENER_FD = 3
BACKLOG = 16
_SOURCES = Path(__file__).parent
_PACKAGES = ("chv", "chv/stord", "chv/stord/proxy")
_MODULES = ("message", "channel", "rewrite", "prelude", "relay", "__main__")
_START = "import sys\nfrom chv.stord.proxy.__main__ import main\nsys.exit(main(sys.argv))\n"
_PYC_HEAD_BYTES = 12  # flags, time and size of the source: all 0, there is no source beside it
_OTHERS_RUN = stat.S_IROTH | stat.S_IXOTH


def argv(worker_id: str, live: Path, program: Path) -> tuple[str, ...]:
    """Return the command line of the proxy for the export at `live`."""
    isolated = (str(interpreter()), "-I", "-S", "-E")
    return (*isolated, str(program), worker_id, str(LISTENER_FD), str(live))


def install(directory: Path) -> Path:
    """Put the program into `directory`, which others may pass through; return its path.

    It is named by its content: one that runs is never changed.
    """
    data = _archive()
    path = directory / f"proxy-{hashlib.sha256(data).hexdigest()[:12]}.pyz"
    if not path.exists():
        atomic_write(path, data, mode=0o444)
    return path


def interpreter() -> Path:
    """Return the interpreter itself, not a virtual environment's link to it."""
    return Path(sys.executable).resolve()


def is_runnable() -> bool:
    """Tell whether every uid may run the interpreter."""
    path = interpreter()
    if path.stat().st_mode & _OTHERS_RUN != _OTHERS_RUN:
        return False
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)


def is_ours(executable: str) -> bool:
    """Tell whether a found process runs what `argv` starts."""
    return Path(executable) == interpreter()


@cache
def _archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        _add(archive, "__main__", _START)
        for package in _PACKAGES:
            _add(archive, f"{package}/__init__", "")
        for module in _MODULES:
            source = (_SOURCES / f"{module}.py").read_text()
            _add(archive, f"chv/stord/proxy/{module}", source)
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, source: str) -> None:
    code = marshal.dumps(compile(source, f"{name}.py", "exec", dont_inherit=True))
    entry = zipfile.ZipInfo(f"{name}.pyc")  # its time is a fixed one: same content, same name
    archive.writestr(entry, importlib.util.MAGIC_NUMBER + bytes(_PYC_HEAD_BYTES) + code)


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, which must be free; the caller closes it."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
