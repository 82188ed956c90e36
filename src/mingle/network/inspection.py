"""The facts that :mod:`mingle.diagnostics.diagnosis` judges, read from /proc, the firewall and the environment.

Nothing here sends a packet, changes anything, or takes long; what can't be read is left out.

Every rank loads this module, for one counter that it reads when it has to wait; the rest is for ranks that have failed
and for ``mingle-discover``. So what only the rest needs is imported where it is needed: together that takes longer to
load than all the machines of a rank.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Interface, IPv6Interface
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from mingle.errors import MingleError
from mingle.network.interfaces import Interface, Kind

if TYPE_CHECKING:
    from mingle.diagnostics.diagnosis import Facts
    from mingle.diagnostics.firewall import Chain, Manager

TOOL_SECONDS = 2.0
NAME_SECONDS = 2.0
"""How long a look-up may take before it is given up."""
_PROC = Path("/proc")


class Observed(Struct, frozen=True, kw_only=True):
    """What the driver's sockets have shown; the other facts are read here."""

    port: int
    group: str = ""
    used: Sequence[Interface] = ()
    found: Sequence[Interface] = ()
    named_by: str = ""
    interface_problem: MingleError | None = None
    multicasts_on: frozenset[str] | None = None
    failures: Mapping[str, str] = field(default_factory=dict)
    send_errors: Mapping[str, int] = field(default_factory=dict)
    relay_failure: str = ""
    unresolved: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    rp_drops_before: int | None = None


def gather(observed: Observed, environ: Mapping[str, str] | None = None) -> Facts:
    """Return the facts.

    Args:
        observed: what the sockets have shown.
        environ: the environment to look at, and with it this host's own name; None: neither matters.
    """
    from mingle.diagnostics.diagnosis import Facts
    from mingle.diagnostics.holders import holders

    names = [each.name for each in observed.used]
    routable = _routable(observed.used)
    problem = observed.interface_problem
    addresses, why = ([], "") if environ is None else resolve(socket.gethostname())
    drops_before = observed.rp_drops_before
    return Facts(
        port=observed.port,
        group=observed.group,
        interface_problem=None if problem is None else (_in_one(problem), problem.remedy or ""),
        used=[str(each) for each in observed.used],
        used_names=names,
        addresses=[str(address.ip) for address in routable],
        networks=[str(address.network) for address in routable],
        unused=[str(each) for each in observed.found if _could_be_meant(each, names)],
        named_by=observed.named_by,
        only_loopback=bool(observed.used) and all(each.loopback for each in observed.used),
        multicasts_on=observed.multicasts_on,
        failures=observed.failures,
        relay_failure=observed.relay_failure,
        send_errors=observed.send_errors,
        holders=holders(observed.port),
        default_route=default_route(),
        memberships=membership_limit(),
        rp_filter=_reverse_path_filters(names),
        rp_drops=0 if drops_before is None else max(0, reverse_path_drops() - drops_before),
        hostname=socket.gethostname(),
        hostname_addresses=addresses,
        hostname_problem=why,
        unresolved=observed.unresolved,
        master="" if environ is None else _master(environ),
        environment_problems=[] if environ is None else _environment_problems(environ),
        versions=observed.versions,
        chains=firewall_chains(),
        manager=firewall_manager(),
    )


def _routable(used: Iterable[Interface]) -> list[IPv4Interface | IPv6Interface]:
    every = [address for each in used for address in each.addresses if not address.is_link_local]
    return sorted(every, key=lambda address: address.version)


def _could_be_meant(interface: Interface, used: Sequence[str]) -> bool:
    routable = any(not address.is_link_local for address in interface.addresses)
    return interface.name not in used and interface.up and routable and interface.kind < Kind.VIRTUAL


def membership_limit() -> int | None:
    """Return how many multicast groups one IPv4 socket can join; None where the system does not report it."""
    return _number(_PROC / "sys/net/ipv4/igmp_max_memberships")


def reverse_path_drops() -> int:
    """Return how many packets the reverse path filter of this network namespace has dropped so far."""
    lines = [line.split() for line in _read(_PROC / "self/net/netstat").splitlines() if line.startswith("TcpExt:")]
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        if "IPReversePathFilter" in names:
            return int(values[names.index("IPReversePathFilter")])
    return 0


def _reverse_path_filters(names: Iterable[str]) -> dict[str, int]:
    """The greater of ``all`` and the interface's own counts (Documentation/networking/ip-sysctl.rst)."""
    general = _number(_PROC / "sys/net/ipv4/conf/all/rp_filter")
    if general is None:
        return {}
    own = {name: _number(_PROC / "sys/net/ipv4/conf" / name.replace("/", ".") / "rp_filter") for name in names}
    return {name: max(general, value) for name, value in own.items() if value is not None}


def default_route() -> bool | None:
    """Return whether there is a default route of either family; None where that can't be read."""
    ipv4, ipv6 = _read(_PROC / "self/net/route"), _read(_PROC / "self/net/ipv6_route")
    if not ipv4:
        return None
    if any(line.split()[1:2] == ["00000000"] and line.split()[7:8] == ["00000000"] for line in ipv4.splitlines()):
        return True
    # The kernel's own "unreachable" entry is bound to lo.
    rows = [line.split() for line in ipv6.splitlines()]
    return any(row[0] == "0" * 32 and row[1] == "00" and row[-1] != "lo" for row in rows)


def resolve(hostname: str) -> tuple[list[str], str]:
    """Return the addresses of a name, and why there are none; a look-up that hangs is abandoned."""
    result: list[tuple[list[str], str]] = []

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
            result.append((list(dict.fromkeys(str(answer[4][0]) for answer in answers)), ""))
        except (OSError, ValueError) as error:
            result.append(([], getattr(error, "strerror", None) or str(error)))

    thread = threading.Thread(target=look_up, name="mingle-abandoned-own-name", daemon=True)
    thread.start()
    thread.join(NAME_SECONDS)
    return result[0] if result else ([], f"no answer within {NAME_SECONDS:g} s")


def firewall_chains() -> list[Chain]:
    """Return the firewall's chains; none where they can't be listed (that takes root)."""
    import shutil

    from mingle.diagnostics.firewall import parse

    tool = shutil.which("nft", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if sys.platform != "linux" or tool is None or os.geteuid() != 0:
        return []
    try:
        done = subprocess.run(
            [tool, "list", "ruleset"], capture_output=True, text=True, timeout=TOOL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # it says nothing then, as where it may not
        return []
    return parse(done.stdout)


def firewall_manager() -> Manager:
    """Return the program that keeps the rules: a rule added behind its back is lost with its next start."""
    import shutil

    if "ENABLED=yes" in _read(Path("/etc/ufw/ufw.conf")):
        return "ufw"
    if Path("/run/firewalld").exists() or Path("/run/firewalld.pid").exists():
        return "firewalld"
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    return "iptables" if shutil.which("nft", path=path) is None and shutil.which("iptables", path=path) else "nft"


def _master(environ: Mapping[str, str]) -> str:
    pair = ("MASTER_ADDR", "MASTER_PORT")
    return " ".join(f"{name}={environ[name]}" for name in pair if environ.get(name))


def _environment_problems(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    from mingle.config import launchers
    from mingle.config.placement import place

    places = ("MINGLE_RANK", "MINGLE_WORLD_SIZE", "RANK", "WORLD_SIZE")
    launched = any(row.is_seen(environ) for row in launchers.LAUNCHERS)
    # A shell that says nothing of ranks is no conflict: the arguments may say it all.
    if not launched and not any(environ.get(name, "").strip() for name in places):
        return []
    try:
        place(environ)
    except MingleError as error:
        return [(_in_one(error), error.remedy or "")]
    return []


def _in_one(error: MingleError) -> str:
    return f"{error.observation}; likely cause: {error.cause}" if error.cause else error.observation


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # not there, or not for us: then nothing is said of it
        return ""
