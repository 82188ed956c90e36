"""Where the kernel tells no news. That it does is seen in the lab, where interfaces can be changed."""

from __future__ import annotations

import errno
import socket
import sys

import pytest

from mingle.network import link_news


@pytest.mark.skipif(sys.platform != "linux", reason="rtnetlink is Linux's")
def test_a_sandbox_that_refuses_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", refuse)
    assert link_news.subscribe() is None


@pytest.mark.skipif(sys.platform != "linux", reason="rtnetlink is Linux's")
def test_a_sandbox_that_refuses_the_groups_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Refusing(socket.socket):
        def __init__(self, *args: int) -> None:
            super().__init__(*args)
            made.append(self)

        def bind(self, _address: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", Refusing)
    assert link_news.subscribe() is None
    assert [each.fileno() for each in made] == [-1]


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert link_news.subscribe() is None
