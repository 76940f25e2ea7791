"""A netlink socket that was handed over is closed, whether anything was asked by it or not."""

from __future__ import annotations

import errno
import os

import pytest

from chv.nwd.kernel import links
from chv.nwd.kernel.rtnl import adopt_socket, open_socket


def is_open(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError as error:
        assert error.errno == errno.EBADF
        return False


@pytest.mark.parametrize("asked", [False, True], ids=["unused", "used"])
async def test_an_adopted_socket_is_closed(asked: bool) -> None:
    fd = open_socket()
    inode = os.fstat(fd).st_ino
    async with adopt_socket(fd, "/proc/self/ns/net") as rtnl:
        assert is_open(fd, inode)
        if asked:
            await rtnl.delete(links.Link(index=2**30, name="nobody's"))  # not there: fine
    assert not is_open(fd, inode)
