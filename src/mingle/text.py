"""Text that people read: what may reach a terminal, addresses, and lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHOWN = 8


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


def few(names: Iterable[object], separator: str = ", ", *, most: int = _SHOWN) -> str:
    """Return the first few of these names, and how many more there are."""
    every = [str(name) for name in names]
    shown = separator.join(every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} more"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as people write them: ``3, 7-9``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    # Two neighbors stay apart: "3, 4" is as short as "3-4" and easier to search for.
    words = [
        f"{first}-{last}" if last - first > 1 else ", ".join(str(rank) for rank in range(first, last + 1))
        for first, last in spans
    ]
    return few(words) if words else "none"


def nnodes_text(minimum: int | None, maximum: int) -> str:
    """Return the value of ``--nnodes``: ``2``, or ``2:4``."""
    return str(maximum) if minimum == maximum else f"{minimum}:{maximum}"


def joined_lines(text: str) -> str:
    """Return an observation as frames and the progress line carry it: without line breaks."""
    return "; ".join(line.strip() for line in text.split("\n")).replace(":; ", ": ")
