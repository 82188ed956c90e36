"""Read the facts that :mod:`mingle.diagnostics.diagnosis` judges: from /proc, the firewall and the environment.

Nothing here sends a packet, changes anything, or takes long; what can't be read is left out. proc(5) and proc_net(5)
describe the formats.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Interface, IPv6Interface
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from mingle import detached
from mingle.config import launchers
from mingle.config.placement import resolve_placement
from mingle.config.settings import check_job_id
from mingle.diagnostics import firewall
from mingle.diagnostics.diagnosis import Facts, Holder
from mingle.diagnostics.firewall import Chain, Manager, Packet
from mingle.errors import MingleError
from mingle.network.connections import literal
from mingle.network.interfaces import Interface, Kind
from mingle.network.routes import port_range, read_text, reverse_path_drops
from mingle.wire import frames

TOOL_SECONDS = 2.0
NAME_SECONDS = 2.0
"""How long a look-up may take before it is given up."""
LOOK_UPS_AT_ONCE = 32
HOLDER_SECONDS = 1.0
"""How long to search /proc for processes. All ranks of a machine time out at once, and each does its own search."""
# A process that uses mingle has both of these libraries in memory.
_MINGLE_LIBRARIES = ("netifaces", "msgspec")
_PROC, _NET = Path("/proc"), Path("/sys/class/net")
_DMI, _CLOUD_ID = Path("/sys/class/dmi/id"), Path("/run/cloud-init/cloud-id")


def collect_facts(
    port: int,
    *,
    used: Sequence[Interface] = (),
    found: Sequence[Interface] = (),
    interface_problem: MingleError | None = None,
    rp_drops_before: int | None = None,
    environ: Mapping[str, str] | None = None,
    brief: bool = False,
    look_up: LookUp | None = None,
    **observed: Any,
) -> Facts:
    """Return the facts about this machine.

    Args:
        port: the UDP port of the discovery.
        used: the interfaces in use.
        found: all interfaces.
        interface_problem: why no interface can be used.
        rp_drops_before: the counter of the reverse path filter when the discovery began.
        environ: the environment to examine, and with it this host's own name; None: neither matters.
        brief: whether to leave out what takes long: the processes that hold the port, and the rules of the firewall.
        look_up: a look-up that has begun before; None: one begins now, and can take `NAME_SECONDS`.
        **observed: further facts, which the sockets have shown.
    """
    # What a check says of the first interface is to be true of packets from other machines.
    names = [each.name for each in sorted(used, key=lambda each: each.loopback)]
    routable = _routable(used)
    look_up = look_up or LookUp.near(used)
    addresses, why = ([], "") if environ is None else resolve(socket.gethostname())
    facts = Facts(
        port=port,
        interface_problem=None if interface_problem is None else _problem(interface_problem),
        used=[str(each) for each in used],
        used_names=names,
        addresses=[str(address.ip) for _, address in routable],
        networks=[str(address.network) for _, address in routable],
        address_names=[name for name, _ in routable],
        port_range=port_range(),
        unused=[str(each) for each in found if _could_be_meant(each, names)],
        only_loopback=bool(used) and all(each.loopback for each in used),
        holders=() if brief else holders(port),
        default_route=default_route(),
        memberships=membership_limit(),
        rp_filter=_reverse_path_filters(names),
        rp_drops=0 if rp_drops_before is None else max(0, reverse_path_drops() - rp_drops_before),
        hostname=socket.gethostname(),
        hostname_addresses=addresses,
        hostname_problem=why,
        master="" if environ is None else _master(environ),
        environment_problems=[] if environ is None else _environment_problems(environ),
        surroundings=surroundings(),
        chains=[] if brief else firewall_chains(),
        manager=firewall_manager(),
        **observed,
    )
    if look_up is None or not look_up.is_silent(wait=not brief):
        return facts
    servers, seconds = name_servers()
    return structs.replace(facts, silent_servers=servers, look_up_seconds=seconds)


def _routable(used: Iterable[Interface]) -> list[tuple[str, IPv4Interface | IPv6Interface]]:
    """Return the addresses that are not link-local, each with the name of its interface, IPv4 first."""
    every = [(each.name, address) for each in used for address in each.addresses if not address.is_link_local]
    return sorted(every, key=lambda each: each[1].version)


def _could_be_meant(interface: Interface, used: Sequence[str]) -> bool:
    routable = any(not address.is_link_local for address in interface.addresses)
    return interface.name not in used and interface.up and routable and interface.kind < Kind.VIRTUAL


def membership_limit() -> int | None:
    """Return how many multicast groups one IPv4 socket can join; None where the system does not report it."""
    return _number(_PROC / "sys/net/ipv4/igmp_max_memberships")


def _reverse_path_filters(names: Iterable[str]) -> dict[str, int]:
    """Return the greater of ``all`` and the interface's own counts (Documentation/networking/ip-sysctl.rst)."""
    general = _number(_PROC / "sys/net/ipv4/conf/all/rp_filter")
    if general is None:
        return {}
    own = {name: _number(_PROC / "sys/net/ipv4/conf" / name.replace("/", ".") / "rp_filter") for name in names}
    return {name: max(general, value) for name, value in own.items() if value is not None}


def default_route() -> bool | None:
    """Return whether there is a default route of either family; None where that can't be read."""
    ipv4, ipv6 = read_text(_PROC / "self/net/route"), read_text(_PROC / "self/net/ipv6_route")
    if not ipv4:
        return None
    if any(line.split()[1:2] == ["00000000"] and line.split()[7:8] == ["00000000"] for line in ipv4.splitlines()):
        return True
    # The kernel's own "unreachable" entry is bound to lo.
    rows = [line.split() for line in ipv6.splitlines()]
    return any(row[0] == "0" * 32 and row[1] == "00" and row[-1] != "lo" for row in rows)


def resolve(hostname: str) -> tuple[list[str], str]:
    """Return the addresses of a name, and why there are none; a look-up that hangs is abandoned."""
    return resolve_all([hostname])[hostname]


def resolve_all(hostnames: Iterable[str]) -> dict[str, tuple[list[str], str]]:
    """Return for each name what `resolve` does; all look-ups together take no longer than one."""
    results: dict[str, tuple[list[str], str]] = {}
    names = list(dict.fromkeys(hostnames))
    waiting = deque(names)

    def look_up() -> None:
        with contextlib.suppress(IndexError):  # all names are taken
            while True:
                name = waiting.popleft()
                results[name] = _looked_up(name)

    threads = [detached.thread("look-up", look_up) for _ in names[:LOOK_UPS_AT_ONCE]]
    deadline = time.monotonic() + NAME_SECONDS
    for thread in threads:
        detached.start_explained(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: results.get(name, ([], f"no answer within {NAME_SECONDS:g} s")) for name in names}


def _looked_up(hostname: str) -> tuple[list[str], str]:
    try:
        answers = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        return [], getattr(error, "strerror", None) or str(error)
    return list(dict.fromkeys(literal(answer[4]) for answer in answers)), ""


class LookUp:
    """A look-up of the name of another host, as torch makes one for each host that it connects to.

    Args:
        address: of that host.
    """

    def __init__(self, address: str) -> None:
        self._until = time.monotonic() + NAME_SECONDS
        self._ended = threading.Event()
        self._late = False

        def look_up() -> None:
            with contextlib.suppress(OSError):
                socket.getnameinfo((address, 0), 0)
            self._late = time.monotonic() >= self._until
            self._ended.set()

        try:
            detached.start(detached.thread("look-up", look_up))
        except RuntimeError:  # the limit of threads is reached: nothing is known of the name servers
            self._ended.set()

    @classmethod
    def near(cls, used: Sequence[Interface]) -> LookUp | None:
        """Begin that of a neighbor in the first network in use; None without a network."""
        routable = [address for _, address in _routable(used) if not address.is_loopback]
        own = {str(address.ip) for address in routable}
        near = itertools.islice(routable[0].network.hosts(), len(own) + 1) if routable else ()
        neighbor = next((str(address) for address in near if str(address) not in own), None)
        return None if neighbor is None else cls(neighbor)

    def is_silent(self, *, wait: bool) -> bool:
        """Return whether the look-up takes longer than `NAME_SECONDS`, as far as it is known."""
        if wait:
            self._ended.wait(max(0.0, self._until - time.monotonic()))
        return self._late if self._ended.is_set() else time.monotonic() >= self._until


def name_servers() -> tuple[list[str], float]:
    """Return this host's name servers, and how long a look-up waits if none of them answers (resolv.conf(5))."""
    words = [line.split() for line in read_text(Path("/etc/resolv.conf")).splitlines()]
    servers = [each[1] for each in words if each[:1] == ["nameserver"] and len(each) > 1][:3] or ["127.0.0.1"]
    options = dict(option.partition(":")[::2] for each in words if each[:1] == ["options"] for option in each[1:])
    timeout, attempts = (
        int(options[name]) if options.get(name, "").isdigit() else default
        for name, default in (("timeout", 5), ("attempts", 2))
    )
    shares = [timeout, *(max(1, (timeout << number) // len(servers)) for number in range(1, len(servers)))]
    return servers, float(attempts * sum(shares))


_VENDORS = (
    "Amazon EC2|Google Compute Engine|Alibaba Cloud|DigitalOcean|Hetzner|Vultr|Linode|Akamai|Scaleway|OVHcloud|UpCloud|"
    "Exoscale|Tencent Cloud|OracleCloud.com"
)
_CLOUD_IDS = "aws|gce|azure|oracle|aliyun|digitalocean|hetzner|vultr|scaleway|upcloud|exoscale|akamai|ibmcloud"
_CLOUDS = frozenset(f"{_VENDORS}|{_CLOUD_IDS}".split("|"))
"""What machines of clouds have in DMI, or in the file of cloud-init."""
_AZURE = "7783-7084-3265-9085-8269-3286-77"
"""The asset tag of Azure's machines, whose vendor is that of every Hyper-V."""
_POD_MARK, _CONTAINER_MARK = "/pods/", "containers/"
"""In the path from which kubelet, or Docker and Podman, mount /etc/hosts."""


def surroundings() -> str:
    """Return ``pod``, ``container``, or the name of the cloud, where this machine shows one of them."""
    mounts = [line.split() for line in read_text(_PROC / "self/mountinfo").splitlines()]
    hosts = next((each[3] for each in reversed(mounts) if each[4:5] == ["/etc/hosts"]), "")
    if os.environ.get("KUBERNETES_SERVICE_HOST") or _POD_MARK in hosts:
        return "pod"
    if _CONTAINER_MARK in hosts and _is_bridged():
        return "container"
    files = (*(_DMI / name for name in ("sys_vendor", "product_name", "chassis_asset_tag")), _CLOUD_ID)
    shown = [read_text(file).strip().replace(_AZURE, "Azure") for file in files]
    return next((each for each in shown if each in _CLOUDS or each == "Azure"), "")


def _is_bridged() -> bool:
    """Return whether each interface but loopback leads into another network namespace, as those of a bridge do.

    A container in the network of its host has that host's cards.
    """
    links = [link for link in _NET.glob("*") if link.name != "lo"]
    return all(read_text(link / "iflink") != read_text(link / "ifindex") for link in links)


def firewall_chains() -> list[Chain]:
    """Return the firewall's chains; none where they can't be listed (that takes root)."""
    tool = shutil.which("nft", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if sys.platform != "linux" or tool is None or os.geteuid() != 0:
        return []
    try:
        done = subprocess.run(
            [tool, "list", "ruleset"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # a comment can hold any bytes
            timeout=TOOL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # then its rules are unknown
        return []
    return firewall.parse(done.stdout)


def blocked_connection(interface: str, own: tuple[str, int], peers: Iterable[tuple[str, int]]) -> frames.Blocked | None:
    """Return what in this machine's firewall blocks TCP connections from or to one of these peers.

    Args:
        interface: on the network of the peers.
        own: this machine's address there, and the port on which it listens.
        peers: the same of the others.
    """
    chains = firewall_chains()
    for address, port in peers:
        packets: list[tuple[firewall.Hook, Packet]] = [
            ("input", Packet("tcp", own[1], own[0], interface, address)),
            ("output", Packet("tcp", port, address, interface, own[0])),
        ]
        # A firewall that lets a connection be opened can drop what follows.
        packets += [(hook, structs.replace(packet, first=False)) for hook, packet in packets]
        for hook, packet in packets:
            block = firewall.blocked(chains, packet, hook)
            chain = "" if block is None else f"{block.chain.family} {block.chain.table} {block.chain.name}"
            is_certain = block is not None and "numgen" not in block.rule
            if block is not None and is_certain and re.search(frames.CHAIN_PATTERN, chain):
                return frames.Blocked(
                    address=address,
                    outgoing=hook == "output",
                    chain=chain,
                    rule=_quotable(block.rule),
                    manager=firewall_manager(),
                )
    return None


def _quotable(rule: str) -> str:
    """Return a rule without comments and counters, which are nobody's business, and without what can't be quoted."""
    readable = firewall.without_noise(rule)
    return "".join(each for each in readable if re.search(frames.RULE_PATTERN, each))[:200].strip()


def firewall_manager() -> Manager:
    """Return the program that keeps the rules: a rule added behind its back is lost with its next start."""
    if "ENABLED=yes" in read_text(Path("/etc/ufw/ufw.conf")):
        return "ufw"
    if Path("/run/firewalld").exists() or Path("/run/firewalld.pid").exists():
        return "firewalld"
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    return "iptables" if shutil.which("nft", path=path) is None and shutil.which("iptables", path=path) else "nft"


def _master(environ: Mapping[str, str]) -> str:
    pair = ("MASTER_ADDR", "MASTER_PORT")
    return " ".join(f"{name}={environ[name]}" for name in pair if environ.get(name))


def _environment_problems(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    places = ("MINGLE_RANK", "MINGLE_WORLD_SIZE", "RANK", "WORLD_SIZE")
    launched = any(row.is_seen(environ) for row in launchers.LAUNCHERS)
    problems = []
    try:
        if "MINGLE_JOB_ID" in environ:
            check_job_id(environ["MINGLE_JOB_ID"], "MINGLE_JOB_ID")
    except MingleError as error:
        problems.append(_problem(error))
    try:
        # A shell that says nothing of ranks is no conflict: the arguments may say it all.
        if launched or any(environ.get(name, "").strip() for name in places):
            resolve_placement(environ)
    except MingleError as error:
        problems.append(_problem(error))
    return problems


def _problem(error: MingleError) -> tuple[str, str]:
    """Return an error's observation, with its cause, and its fix."""
    cause = f"; likely cause: {error.cause}" if error.cause else ""
    return f"{error.observation}{cause}", error.remedy or ""


# --- the processes that hold the port -------------------------------------------------------------------------------


def holders(port: int, protocol: Literal["udp", "tcp"] = "udp") -> tuple[Holder, ...]:
    """Return the other processes that hold a port in this network namespace (Linux).

    The search ends after `HOLDER_SECONDS` and returns what it has found so far.
    """
    inodes = _sockets(port, protocol)
    if not inodes:
        return ()
    deadline = time.monotonic() + HOLDER_SECONDS
    owners, cut_short = _owners(frozenset(inodes), deadline)
    # The sockets of a process that has ended meanwhile are gone from the table as well.
    inodes = {inode: user for inode, user in _sockets(port, protocol).items() if inode in inodes}
    found: dict[int | None, Holder] = {}
    for inode, user in inodes.items():
        pids = owners.get(inode, ())
        for pid in pids:
            # The search names at least one holder, even after the deadline.
            if pid == os.getpid() or pid in found or (found and time.monotonic() >= deadline):
                continue
            if (holder := _holder(pid, user)) is not None:
                found[pid] = holder
        if not pids:
            found.setdefault(None, Holder(None, user=user, cut_short=cut_short))
    known = sum(holder.mingle for holder in found.values()) + any(os.getpid() in pids for pids in owners.values())
    if None in found and _relaying(port) > known:
        # Ranks of another user or container: their processes can't be seen, but the names of their sockets can.
        found[None] = structs.replace(found[None], mingle=True)
    return tuple(found.values())


def _sockets(port: int, protocol: str) -> dict[int, int]:
    """Return the sockets bound to a port: inode to user id."""
    found: dict[int, int] = {}
    for table in (protocol, f"{protocol}6"):
        for line in read_text(_PROC / "self/net" / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and int(fields[1].rpartition(":")[2], 16) == port:
                found[int(fields[9])] = int(fields[7])
    found.pop(0, None)  # connections in TIME_WAIT, which no process holds
    return found


def _relaying(port: int) -> int:
    """Return how many processes have a place in the local relay (:mod:`mingle.network.local_relay`)."""
    names = (line.rpartition(" ")[2] for line in read_text(_PROC / "self/net/unix").splitlines())
    return len({name for name in names if name.startswith(f"@mingle/udp-{port}/")})


def _owners(inodes: frozenset[int], deadline: float) -> tuple[dict[int, list[int]], bool]:
    """Return the processes that hold each socket, and whether the time was too short to look at all of them."""
    owners: dict[int, list[int]] = {}
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    with os.scandir(_PROC) as processes:
        for process in processes:
            if not process.name.isdigit():
                continue
            for link in _links(process.path):
                if link in wanted and int(process.name) not in owners.get(wanted[link], ()):
                    owners.setdefault(wanted[link], []).append(int(process.name))
                if time.monotonic() >= deadline:
                    return owners, True
    return owners, False


def _links(process: str) -> Iterator[str]:
    """Yield the target of each descriptor of a process, then an empty text, which is all for an unreadable process."""
    with contextlib.suppress(OSError), os.scandir(f"{process}/fd") as descriptors:  # ended, or another user's
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                yield os.readlink(descriptor.path)  # noqa: PTH115 - the text matters, not a path
    yield ""


def _holder(pid: int, user: int) -> Holder | None:
    """Return the process, or None for one that is ending: its memory, which shows what it is, goes before its files."""
    process = _PROC / str(pid)
    words = read_text(process / "cmdline").replace("\0", " ").split() or read_text(process / "comm").split()
    maps = read_text(process / "maps")
    if not maps:
        return None
    command = " ".join(words)[:120]  # the process chose it, line breaks included
    return Holder(pid, command, user, mingle=all(library in maps for library in _MINGLE_LIBRARIES))


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None
