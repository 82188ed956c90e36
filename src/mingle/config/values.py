"""Arguments and environment text into typed values: numbers, addresses, peers and secrets.

Each function names the source of a value in its errors, as a reader would write it: ``RANK='x'``, ``rank=7``.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
import numbers
import operator
import os
import re
import select
import stat
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from mingle.errors import ConfigurationError, MingleError
from mingle.text import endpoint_text
from mingle.wire.datagrams import MAX_WORLD_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from ipaddress import IPv4Address, IPv6Address

MAX_PORT = 65535
_MAX_SECRET_BYTES = 64 * 1024
PIPE_SECONDS = 5.0
"""How long a secret file that is a pipe can take to reach its end, from its opening on."""
SAFE_SECRET_CHARACTERS = 16
"""A shorter secret is used with a warning."""
_MAX_REMARKS = 16
_remarks: dict[str, bool] = {}
"""Warnings about secrets; the value is True until the warning has been reported."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_LOCAL_SCHEMES = ("file", "local", "memory")
_OTHER_SCHEMES = ("http", "https", "tcp", "udp", "env", "mingle", "zip", "tar")
_SEPARATORS = r"[,;\s]+"
# Host names are left to the resolver, but for what can only be a slip: a pasted URL, an option, a bracket.
_NOT_A_HOST = r"[/@\[\]\\\"'=]|^-"


class Peer(Struct, frozen=True):
    """A host to talk to by unicast; without a port, the discovery port is meant."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        return self.host if self.port is None else endpoint_text(self.host, self.port)


class Secret:
    """A secret with a masked repr; ``bytes(secret)`` returns the value.

    Tracebacks that show local variables (rich, Sentry, ``pytest -l``) print their reprs. The class does not derive from
    ``bytes`` or ``str``, because rich prints a slice of these.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    @classmethod
    def of(cls, value: object) -> Secret | None:
        """Return an argument as a secret, unchecked; None stays None."""
        return value if value is None or isinstance(value, Secret) else cls(value)

    def __bytes__(self) -> bytes:
        value = self.value
        # PEP 383: os.environ returns bytes that it can't decode as lone surrogates.
        return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(cast("bytes", value))

    def __len__(self) -> int:
        return len(bytes(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret | bytes):
            return NotImplemented
        return hmac.compare_digest(bytes(self), bytes(other))

    def __hash__(self) -> int:
        return hash(bytes(self))

    def __repr__(self) -> str:
        return "Secret(...)"


def text_of(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the stripped value of the first variable that is set and not blank, else None."""
    return next((text for name in names if (text := environ.get(name, "").strip())), None)


def parse_whole(
    text: str,
    source: str,
    *,
    minimum: int = 0,
    maximum: int = MAX_WORLD_SIZE,
    error: type[MingleError] = ConfigurationError,
    written: str = "",
) -> int:
    """Return the whole number that an environment variable holds.

    Only ASCII digits and a sign are accepted; other forms that ``int`` accepts (``1_000``, other scripts' digits) are
    probably mistakes.

    Args:
        text: the number.
        source: where it comes from.
        minimum: the smallest accepted number.
        maximum: the largest.
        error: the class of the error.
        written: how an error shows the number, if it is part of a longer value.

    Raises:
        MingleError: of the class ``error``, when the text is not a whole number within the limits.
    """
    written = written or f"{source}={text!r}"
    # Twenty digits are more than any limit here needs, and keep clear of int's own limit on a text's length.
    if re.fullmatch(r"[+-]?[0-9]{1,20}", text) is None:
        raise _outside_limits(written, "is not a whole number", minimum, maximum, error)
    return _within(int(text), written, minimum, maximum, error)


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to a mistyped one, if any is similar enough."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def check_whole(value: object, source: str, *, minimum: int = 0, maximum: int = MAX_WORLD_SIZE) -> int:
    """Return an argument as an ``int``; integers of other libraries count, ``bool`` does not.

    Raises:
        ConfigurationError: when it is not an integer within the limits.
    """
    written = f"{source}={value!r}"
    if isinstance(value, str):
        raise ConfigurationError.explain(
            f"{written} is a str, not an integer",
            cause="a value out of os.environ or of a command line was passed on as it was",
            remedy=f"convert it: {source}=int(...), a whole number from {minimum} to {maximum}",
        )
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
    """Return a duration, given as text, as a number of seconds or as a timedelta, in seconds.

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
    """Return, in its canonical form, an IP literal that other hosts can use.

    Raises:
        ConfigurationError: when it is a name, is bound to one host by a zone, or addresses no single host.
    """
    parsed = parse_address(text) if isinstance(text, str) else None
    if parsed is None or not _is_one_host(parsed) or "%" in str(parsed):
        raise ConfigurationError.explain(
            f"{source}={text!r} is not the IP address of one host",
            cause="a host name, an address with a port or a zone, or a wildcard or multicast address",
            remedy="give the IPv4 or IPv6 address at which the other ranks reach this host, e.g. 203.0.113.7",
        )
    return str(parsed)


def items(value: object) -> list[Any]:
    """Return the items of a sequence, unchecked; a text, or an object that is not a sequence, is one item."""
    return [*value] if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [value]


def words(value: str | Iterable[str], source: str) -> tuple[str, ...]:
    """Return the items of a separated text, or of a sequence of such texts, in order, each once.

    Raises:
        ConfigurationError: when an item is not a string, or a text that was given holds no item at all.
    """
    parts = items(value)
    found: dict[str, None] = {}
    for part in parts:
        names = [name for name in re.split(_SEPARATORS, part) if name] if isinstance(part, str) else []
        if not names:
            raise ConfigurationError.explain(
                f"{source}={_as_given(parts)!r} holds {part!r}, which names nothing",
                cause="an empty text, or a value that is not a string",
                remedy=f"leave {source} out, or give one or several names separated by commas",
            )
        found.update(dict.fromkeys(names))
    return tuple(found)


def peers(value: str | Iterable[str], source: str) -> tuple[Peer, ...]:
    """Return the peers in a text, or in a sequence of texts, in order, each once; `folders` returns what else is there.

    A peer is ``host``, ``host:port``, an IPv6 address, or ``[IPv6 address]:port``; commas, semicolons and
    white space separate.

    Raises:
        ConfigurationError: when an item is none of these.
    """
    given = items(value)
    return tuple(dict.fromkeys(_peer(word, source, given) for word in words(given, source) if not _is_folder(word)))


def folders(value: str | Iterable[str], source: str) -> tuple[str, ...]:
    """Return the shared folders in the same text: ``dir:/absolute/path`` or ``scheme://…``, in order, each once.

    Raises:
        ConfigurationError: when a path is not absolute, or a URL does not name storage that all machines share.
    """
    return tuple(dict.fromkeys(_folder(word, source) for word in words(value, source) if _is_folder(word)))


def _is_folder(word: str) -> bool:
    return word.startswith("dir:") or "://" in word


def _folder(word: str, source: str) -> str:
    return _directory(word, source) if word.startswith("dir:") else _bucket(word, source)


def _bucket(word: str, source: str) -> str:
    scheme, _, rest = word.partition("://")
    place = rest.partition("/")[0]
    if ":" in place.rpartition("@")[0]:
        # First, and without the word itself: it holds the password.
        raise ConfigurationError.explain(
            f"{source} holds a {scheme}:// URL with a password, which errors and logs would show",
            cause="credentials in the URL",
            remedy="give them as the back end of fsspec expects them, e.g. in its configuration file",
        )
    cause = remedy = ""
    if scheme in _LOCAL_SCHEMES:
        cause = "a URL that names the files of one machine"
        remedy = "write dir: and the absolute path of a directory that all machines mount, e.g. dir:/shared/mingle"
    elif scheme in _OTHER_SCHEMES or not _SCHEME.fullmatch(scheme):
        cause = f"a URL that names no storage: {scheme!r}" if scheme else "a URL without a scheme"
        remedy = "write a host, dir:/path, or a bucket such as s3://bucket/mingle"
    elif not place or not rest.isprintable() or set(rest) & set("?#"):
        cause = "a URL without a bucket, or with a query"
        remedy = "write the bucket and a prefix in it, e.g. s3://bucket/mingle"
    if cause:
        raise ConfigurationError.explain(
            f"{source} holds {word!r}, which names no shared folder", cause=cause, remedy=remedy
        )
    return word.rstrip("/")


def _directory(word: str, source: str) -> str:
    path = Path(word.removeprefix("dir:"))
    with contextlib.suppress(RuntimeError):  # there is no such user, or none at all
        path = path.expanduser()  # the shell does not, behind the colon
    if not path.is_absolute() or "\0" in str(path):
        raise ConfigurationError.explain(
            f"{source} holds {word!r}, which names no shared folder",
            cause="a relative path, which can be another directory on each machine",
            remedy="write dir: and the absolute path, e.g. dir:/shared/mingle",
        )
    return f"dir:{path}"


def _as_given(parts: list[Any]) -> object:
    """Return what an error shows: one text as it is, several as a list."""
    return parts[0] if len(parts) == 1 else parts


def _peer(word: str, source: str, given: list[Any]) -> Peer:
    host, port = word, None
    if word.startswith("["):
        host, bracket, rest = word[1:].partition("]")
        literal = parse_address(host)
        if not bracket or (rest and not rest.startswith(":")) or literal is None or literal.version != 6:
            raise _not_a_peer(word, source)
        port = rest[1:] if rest else None
    else:
        if word.count(":") == 1:
            host, port = word.split(":")
        literal = parse_address(host)
        # What looks like an address must be one; a text with several colons can only be of IPv6.
        if literal is None and (":" in host or re.fullmatch(r"[0-9.]*", host)):
            raise _not_a_peer(word, source)
    if re.search(_NOT_A_HOST, host) or (literal is not None and not _is_one_host(literal)):
        raise _not_a_peer(word, source)
    if port is None:
        return Peer(host)
    written = f"{source}={_as_given(given)!r}: the port of {word!r}"
    return Peer(host, parse_whole(port, source, minimum=1, maximum=MAX_PORT, written=written))


def _not_a_peer(word: str, source: str) -> ConfigurationError:
    if word.startswith(("/", "~")):
        return ConfigurationError.explain(
            f"{source} holds {word!r}, which is not a peer",
            cause="the path of a directory without dir: in front",
            remedy=f"write dir:{word} for a directory that all machines mount",
        )
    return ConfigurationError.explain(
        f"{source} holds {word!r}, which is not a peer",
        cause="a mistyped address, a URL, a multicast address, or an IPv6 address and port without brackets",
        remedy="write host, host:port, an IPv6 address, or [IPv6 address]:port; separate several by commas",
    )


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that a text writes, perhaps with a zone; None if it writes none."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_one_host(address: IPv4Address | IPv6Address) -> bool:
    return not (address.is_multicast or address.is_unspecified)


def checked_secret(secret: Secret, source: str) -> Secret:
    """Return the checked secret; a text is used as its bytes in UTF-8.

    Raises:
        ConfigurationError: when it is empty, or neither text nor bytes; neither the message nor a frame holds the
            value.
    """
    if not isinstance(secret.value, str | bytes):
        raise ConfigurationError.explain(
            f"{source} is a {type(secret.value).__name__}",
            cause="another object was passed in its place",
            remedy="give it as str or bytes",
        )
    try:
        length = len(secret)
    except UnicodeEncodeError:
        length = -1  # raise below: this exception and its frames hold the value, and must not become a context
    if length < 0:
        raise ConfigurationError.explain(
            f"{source} holds a surrogate, which is not text",
            cause="text that was decoded in a wrong way",
            remedy="give it as bytes",
        )
    if length == 0:
        raise ConfigurationError.explain(
            f"{source} is an empty secret",
            cause="a variable or a file that was to hold the secret was never filled in",
            remedy="give the job's secret, or leave it out to run without one",
        )
    return secret


def read_secret_file(path: str, source: str) -> Secret:
    """Return the content of a secret file without its last line end. At most 64 KiB are read.

    Raises:
        ConfigurationError: when the file can't be read, is empty, or is too large to be a secret, or when it is a pipe
            that does not end.
    """
    try:
        with open(path, "rb", opener=_open_soon) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = _read_pipe(file.fileno()) if stat.S_ISFIFO(mode) else Secret(file.read(_MAX_SECRET_BYTES + 1))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError.explain(
            f"{source}={path!r} can't be read: {reason}",
            cause="a wrong path, a secret that is not mounted, or missing permission",
            remedy="name a file that the user of this process can read",
        ) from error
    if content is None:
        raise ConfigurationError.explain(
            f"{source}={path!r} is a pipe that has not ended within {PIPE_SECONDS:g} s",
            cause="no process writes the secret to it, or its writer does not close it",
            remedy="have the writer close the pipe after the secret, or name a regular file",
        )
    if len(content) > _MAX_SECRET_BYTES:
        raise ConfigurationError.explain(
            f"{source}={path!r} holds more than {_MAX_SECRET_BYTES} bytes",
            cause="another file than the secret's was named",
            remedy="name the file that holds the secret alone",
        )
    if mode & stat.S_IROTH:  # not the group: Kubernetes sets it for fsGroup
        remark(
            f"the secret file {path} can be read by other users of this machine (mode {stat.S_IMODE(mode):04o}); "
            f"fix: chmod 600 {path} (Kubernetes: defaultMode: 0400)"
        )
    return checked_secret(Secret(re.sub(rb"\r?\n\Z", b"", bytes(content))), f"{source}={path!r}")


def _open_soon(path: str, flags: int) -> int:
    """Open a file; open(2) would wait forever for the writer of a pipe, so a pipe stays in non-blocking mode."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, not stat.S_ISFIFO(os.fstat(descriptor).st_mode))
    return descriptor


def _read_pipe(descriptor: int) -> Secret | None:
    """Return what a pipe holds up to its end or the limit; None if neither comes in time."""
    deadline = time.monotonic() + PIPE_SECONDS
    ready = select.poll()  # select(2) takes no descriptor from 1024 on
    ready.register(descriptor, select.POLLIN)
    content = Secret(b"")
    while len(content) <= _MAX_SECRET_BYTES:
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        length = len(content)
        content = Secret(bytes(content) + os.read(descriptor, _MAX_SECRET_BYTES + 1 - length))
        if len(content) == length:
            break
    return content


def remark(text: str) -> None:
    """Keep a warning until the caller of `remarks` shows it."""
    if text not in _remarks and len(_remarks) < _MAX_REMARKS:
        _remarks[text] = True


def remarks(secret: Secret | None) -> list[str]:
    """Return the warnings about this secret, and about the files and job ids that were read, each once per process."""
    if secret is not None and len(bytes(secret).decode(errors="replace")) < SAFE_SECRET_CHARACTERS:
        remark(
            f"the secret has fewer than {SAFE_SECRET_CHARACTERS} characters, so a process that hears one datagram "
            "can guess it; fix: head -c 32 /dev/urandom | base64"
        )
    fresh = [text for text, is_fresh in _remarks.items() if is_fresh]
    _remarks.update(dict.fromkeys(fresh, False))
    return fresh
