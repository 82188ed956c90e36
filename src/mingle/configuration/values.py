"""Arguments and environment text into typed values: numbers, addresses, peers and secrets.

Each function names the source of a value in its errors, as a reader would write it: ``RANK='x'``, ``rank=7``.
"""

from __future__ import annotations

import ipaddress
import math
import numbers
import operator
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from mingle.errors import ConfigurationError, MingleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_COUNT = 1_000_000
"""The largest rank or size: what a datagram may say (``mingle.wire.datagrams.MAX_WORLD_SIZE``)."""

MAX_PORT = 65535
_MAX_SECRET_BYTES = 64 * 1024
_SEPARATORS = re.compile(r"[,;\s]+")
# Host names are left to the resolver, but for what can only be a slip: a pasted URL, an option, a bracket.
_NOT_A_HOST = re.compile(r"[/@\[\]\\\"'=]|^-")


class Peer(Struct, frozen=True):
    """A host to talk to by unicast; without a port, the discovery port is meant."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def text_of(environ: Mapping[str, str], *names: str) -> str | None:
    """Returns the stripped value of the first variable that is set and not blank, else None."""
    return next((text for name in names if (text := environ.get(name, "").strip())), None)


def parse_whole(
    text: str,
    source: str,
    *,
    minimum: int = 0,
    maximum: int = MAX_COUNT,
    error: type[MingleError] = ConfigurationError,
) -> int:
    """Returns the whole number that an environment variable holds.

    Decimal digits and a sign count: what ``int`` takes besides (``1_000``, other scripts' digits) is a slip.

    Raises:
        MingleError: of the class ``error``, when the text is no whole number within the limits.
    """
    # Twenty digits are more than any limit here needs, and keep clear of int's own limit on a text's length.
    if re.fullmatch(r"[+-]?[0-9]{1,20}", text) is None:
        raise _outside_limits(f"{source}={text!r}", "is not a whole number", minimum, maximum, error)
    return _within(int(text), f"{source}={text!r}", minimum, maximum, error)


def check_whole(value: object, source: str, *, minimum: int = 0, maximum: int = MAX_COUNT) -> int:
    """Returns an argument as an ``int``; integers of other libraries count, ``bool`` does not.

    Raises:
        ConfigurationError: when it is no integer within the limits.
    """
    written = f"{source}={value!r}"
    # operator.index takes True for 1, but rank=True is a mix-up of arguments.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _outside_limits(written, "is not an integer", minimum, maximum, ConfigurationError)
    return _within(operator.index(value), written, minimum, maximum, ConfigurationError)


def _within(value: int, written: str, minimum: int, maximum: int, error: type[MingleError]) -> int:
    if value < minimum:
        problem = "is negative" if value < 0 <= minimum else "is too small"
        raise _outside_limits(written, problem, minimum, maximum, error)
    if value > maximum:
        raise _outside_limits(written, "is too large", minimum, maximum, error)
    return value


def _outside_limits(written: str, problem: str, minimum: int, maximum: int, error: type[MingleError]) -> MingleError:
    return error.explain(
        f"{written} {problem}",
        cause="a mistyped value, or a variable that a template did not fill in",
        remedy=f"give a whole number from {minimum} to {maximum}",
    )


def seconds(value: object, source: str) -> float:
    """Returns a duration, given as text, as a number of seconds or as a timedelta, in seconds.

    Raises:
        ConfigurationError: when it is not a finite number above zero.
    """
    written = f"{source}={value!r}"
    try:
        if isinstance(value, timedelta):
            result = value.total_seconds()
        elif isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
            result = math.nan
        else:
            result = float(value)
    except (ValueError, OverflowError):
        result = math.nan
    if not (math.isfinite(result) and result > 0):
        raise ConfigurationError.explain(
            f"{written} is not a finite number of seconds above zero",
            cause="a mistyped value, or a unit such as '5m' where plain seconds are wanted",
            remedy="give the seconds to wait, e.g. 300; to wait very long, give a large number",
        )
    return result


def address(text: object, source: str) -> str:
    """Returns an IP literal, that other hosts can be told, in its canonical form.

    Raises:
        ConfigurationError: when it is a name, is bound to one host by a zone, or addresses no single host.
    """
    try:
        parsed = ipaddress.ip_address(text) if isinstance(text, str) else None
    except ValueError:
        parsed = None
    if parsed is None or parsed.is_multicast or parsed.is_unspecified or "%" in str(parsed):
        raise ConfigurationError.explain(
            f"{source}={text!r} is not the IP address of one host",
            cause="a host name, an address with a port or a zone, or a wildcard or multicast address",
            remedy="give the IPv4 or IPv6 address at which the other ranks reach this host, e.g. 203.0.113.7",
        )
    return str(parsed)


def words(value: str | Iterable[str], source: str) -> tuple[str, ...]:
    """Returns the items of a separated text, or of a sequence of such texts, in order, each once.

    Raises:
        ConfigurationError: when an item is not a string, or a text that was given holds no item at all.
    """
    parts: list[object] = [value] if isinstance(value, str) else [*value]
    found: dict[str, None] = {}
    for part in parts:
        items = [item for item in _SEPARATORS.split(part) if item] if isinstance(part, str) else []
        if not items:
            raise ConfigurationError.explain(
                f"{source}={value!r} holds {part!r}, which names nothing",
                cause="an empty text, or a value that is not a string",
                remedy=f"leave {source} out, or give one or several names separated by commas",
            )
        found.update(dict.fromkeys(items))
    return tuple(found)


def peers(value: str | Iterable[str], source: str) -> tuple[Peer, ...]:
    """Returns the peers in a text, or in a sequence of texts, in order, each once.

    A peer is ``host``, ``host:port``, an IPv6 address, or ``[IPv6 address]:port``; commas, semicolons and
    white space separate.

    Raises:
        ConfigurationError: when an item is none of these.
    """
    return tuple(dict.fromkeys(_peer(word, source) for word in words(value, source)))


def _peer(word: str, source: str) -> Peer:
    host, port = word, None
    if word.startswith("["):
        host, bracket, rest = word[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or not _is_address(host, 6):
            raise _not_a_peer(word, source)
        port = rest[1:] if rest else None
    elif word.count(":") == 1:
        host, port = word.split(":")
    elif ":" in word and not _is_address(word, 6):
        raise _not_a_peer(word, source)
    if not host or _NOT_A_HOST.search(host) or (re.fullmatch(r"[0-9.]+", host) and not _is_address(host, 4)):
        raise _not_a_peer(word, source)
    if _is_address(host) and _is_no_single_host(host):
        raise _not_a_peer(word, source)
    if port is None:
        return Peer(host)
    port_source = f"the port of peer {word!r} in {source}"
    return Peer(host, parse_whole(port, port_source, minimum=1, maximum=MAX_PORT))


def _not_a_peer(word: str, source: str) -> ConfigurationError:
    return ConfigurationError.explain(
        f"{source} holds {word!r}, which is not a peer",
        cause="a mistyped address, a URL, a multicast address, or an IPv6 address and port without brackets",
        remedy="write host, host:port, an IPv6 address, or [IPv6 address]:port; separate several by commas",
    )


def _is_address(text: str, version: int | None = None) -> bool:
    try:
        return ipaddress.ip_address(text).version in {version, *((4, 6) if version is None else ())}
    except ValueError:
        return False


def _is_no_single_host(text: str) -> bool:
    parsed = ipaddress.ip_address(text)
    return parsed.is_multicast or parsed.is_unspecified


def secret_bytes(value: object, source: str) -> bytes:
    """Returns a secret as bytes; a text is encoded in UTF-8.

    Raises:
        ConfigurationError: when it is empty, or neither text nor bytes; the value is never in the message.
    """
    if isinstance(value, str):
        try:
            # PEP 383: os.environ hands over bytes that it can't decode as lone surrogates.
            value = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            # "from None": the original exception carries the secret.
            raise ConfigurationError.explain(
                f"{source} holds a surrogate, which is not text",
                cause="text that was decoded in a wrong way",
                remedy="give the secret as bytes",
            ) from None
    if not isinstance(value, bytes):
        raise ConfigurationError.explain(
            f"{source} is a {type(value).__name__}",
            cause="another object was passed in its place",
            remedy="give the secret as str or bytes",
        )
    if not value:
        raise ConfigurationError.explain(
            f"{source} is an empty secret",
            cause="a variable or a file that was to hold the secret was never filled in",
            remedy=f"give the job's secret, or leave {source} out to run without one",
        )
    return value


def read_secret_file(path: str, source: str) -> bytes:
    """Returns the content of a secret file without its last line end. At most 64 KiB are read.

    Raises:
        ConfigurationError: when the file can't be read, is empty, or is too large to be a secret.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError.explain(
            f"{source}={path!r} can't be read: {reason}",
            cause="a wrong path, a secret that is not mounted, or missing permission",
            remedy="name a file that the user of this process can read",
        ) from error
    if len(content) > _MAX_SECRET_BYTES:
        raise ConfigurationError.explain(
            f"{source}={path!r} holds more than {_MAX_SECRET_BYTES} bytes",
            cause="another file than the secret's was named",
            remedy="name the file that holds the secret alone",
        )
    return secret_bytes(re.sub(rb"\r?\n\Z", b"", content), f"{source}={path!r}")
