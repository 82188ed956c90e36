"""Text that people read: what may reach a terminal, and addresses."""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    """Return text with escapes in place of what moves a cursor, changes a color or turns the direction.

    It is for what this machine says: the user's own job id, a command line, an interface. Text from the network is
    printable once it is decoded (:func:`one_line`).

    Args:
        text: what is to be shown.
        keep: characters that stay, such as the line breaks of a message.
    """
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode("ascii") for each in text
    )


def one_line(text: str) -> str:
    """Return remote text on one line: white space becomes a space, other unprintable characters become "?".

    A terminal obeys control characters, and a line break would let a sender write lines that look like ours. The
    result is never longer in UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in text)


def endpoint_text(address: str, port: int | str) -> str:
    """Return ``address:port``, with an IPv6 address in brackets (RFC 3986, section 3.2.2)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
