"""The kernel's word that an interface or an address has come or gone, so that nobody has to keep looking.

A look costs about a millisecond; a thousand ranks that wait on one machine and look every two seconds take half a
core for it. rtnetlink(7) tells instead, on Linux. Nothing that it says is read: it is a reason to look, and no more, so
it does not matter who may have said it.
"""

from __future__ import annotations

import contextlib
import socket
import sys

from mingle import forksafe

# <linux/rtnetlink.h>: which news are wanted.
_RTMGRP_LINK = 0x1
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_DRAINED_AT_ONCE = 64


def subscribe() -> socket.socket | None:
    """Returns a socket that becomes readable when there is news; None where the kernel tells none.

    That is so on other systems than Linux, and in sandboxes that do not let a process ask.
    """
    if sys.platform != "linux":
        return None
    try:
        news = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    except OSError:
        return None
    try:
        news.setblocking(False)
        news.bind((0, _RTMGRP_LINK | _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR))
    except OSError:
        news.close()
        return None
    return forksafe.register(news)


def drain(news: socket.socket) -> None:
    """Takes out what there is; what remains makes the socket readable again."""
    # BlockingIOError: that was all. ENOBUFS: more came than there was room for, and that is news, too.
    with contextlib.suppress(OSError):
        for _ in range(_DRAINED_AT_ONCE):
            news.recv(1)  # of a datagram the rest is dropped
