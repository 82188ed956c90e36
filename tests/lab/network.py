"""A network of the lab: a bridge in a namespace of its own, to which hosts are attached by veth pairs.

The namespace matters: in the machine's own one a Docker daemon drops what bridges forward.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
import time
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError
from .messages import MakeNamespace, NamespaceMade
from .zygote_client import ZygoteClient

TOOLS = ("ip", "bridge", "nft", "nsenter")
_TOOL_SECONDS = 30.0
_FORWARDING_SECONDS = 10.0
_BRIDGE = "lan"


@dataclass(frozen=True)
class NetworkNamespace:
    """The test's handle on a network namespace that the zygote holds."""

    key: int
    path: str

    @classmethod
    def make(
        cls, zygote: ZygoteClient, hostname: str, sysctls: dict[str, str], files: dict[str, str] | None = None
    ) -> NetworkNamespace:
        """Make one, with a host name and mounts (see `MakeNamespace`)."""
        made = zygote.request(MakeNamespace(hostname, files or {}, sysctls), NamespaceMade)
        return cls(made.key, made.path)

    def ip(self, *commands: str) -> None:
        """Run commands of ip(8), without the word ``ip``, in one process; the first that fails ends them."""
        self.tool(["ip", "-batch", "-"], "\n".join(commands) + "\n")

    def nft(self, ruleset: str) -> None:
        """Apply a ruleset of nft(8), all of it or nothing."""
        self.tool(["nft", "-f", "-"], ruleset)

    def tool(self, command: list[str], text: str = "") -> str:
        """Run any program of the machine inside and return what it printed.

        Raises:
            LabError: it failed; its input and its complaint are in the message.
        """
        done = subprocess.run(
            ["nsenter", f"--net={self.path}", *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=_TOOL_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise LabError(
                f"`{' '.join(command)}` failed with status {done.returncode} in a namespace of the lab: "
                f"{done.stderr.strip()}\nits input was:\n{text}"
            )
        return done.stdout


@dataclass(frozen=True)
class _OneWay:
    """Frames that leave a host's port, or go to it, are dropped if they match."""

    port: str
    direction: str
    match: str

    def rule(self) -> str:
        side = "iifname" if self.direction == "out" else "oifname"
        return f'{side} "{self.port}" {self.match} drop'


class Network:
    """A layer 2 network with an IPv4 subnet, an IPv6 subnet, both or neither. Made by `Lab.network`."""

    def __init__(
        self,
        zygote: ZygoteClient,
        number: int,
        ipv4: str | None,
        ipv6: str | None,
        *,
        snooping: bool,
        querier: bool,
        link_local: bool,
    ) -> None:
        self.ipv4 = None if ipv4 is None else ipaddress.IPv4Network(ipv4)
        self.ipv6 = None if ipv6 is None else ipaddress.IPv6Network(ipv6)
        self.link_local = link_local
        self._number = number
        self._ports = 0
        self._one_way: list[_OneWay] = []
        self._partition: list[list[str]] = []
        # Bridged packets are not to pass the inet rules of the bridge's namespace as well (br_netfilter).
        sysctls = {f"net/bridge/bridge-nf-call-{table}": "0" for table in ("iptables", "ip6tables", "arptables")}
        self.namespace = NetworkNamespace.make(zygote, f"lan{number}", sysctls if _has_br_netfilter() else {})
        self.namespace.ip(
            f"link add {_BRIDGE} type bridge mcast_snooping {snooping:d} mcast_querier {querier:d}",
            f"link set {_BRIDGE} addrgenmode none up",
        )

    def __repr__(self) -> str:
        subnets = [str(subnet) for subnet in (self.ipv4, self.ipv6) if subnet is not None]
        return f"<network {self._number}: {', '.join(subnets) or 'no subnet'}>"

    def next_port(self) -> tuple[int, str]:
        """A number for a host's addresses, counted from 1, and the name of its port on the bridge."""
        self._ports += 1
        return self._ports, f"port{self._ports}"

    def plug(self, port: str) -> None:
        """Attach a port whose veth pair exists already."""
        self.namespace.ip(f"link set {port} addrgenmode none master {_BRIDGE} up")

    def set_port(self, port: str, *, up: bool) -> None:
        """Plug a cable in or out: the host sees its carrier come or go."""
        self.namespace.ip(f"link set {port} {'up' if up else 'down'}")
        if up:
            self.wait_forwarding([port])

    def wait_forwarding(self, ports: Collection[str]) -> None:
        """Wait until the bridge forwards on these ports: the kernel sees a new carrier with a short delay."""
        deadline = time.monotonic() + _FORWARDING_SECONDS
        while True:
            links = json.loads(self.namespace.tool(["bridge", "-json", "link", "show"]))
            states = {link["ifname"]: link["state"] for link in links}
            if all(states.get(port) == "forwarding" for port in ports):
                return
            if time.monotonic() > deadline:
                raise LabError(f"{self!r} did not forward within {_FORWARDING_SECONDS} s: {states}")

    def drop_one_way(self, port: str, direction: str, match: str) -> None:
        """Drop what goes to (``in``) or comes from (``out``) the host on this port and matches, silently."""
        self._one_way.append(_OneWay(port, direction, match))
        self._apply()

    def clear_one_way(self, port: str) -> None:
        """Take back `drop_one_way` for this port."""
        self._one_way = [rule for rule in self._one_way if rule.port != port]
        self._apply()

    def partition(self, groups: Iterable[Iterable[str]]) -> None:
        """Drop what goes between ports of different groups; no groups: nothing."""
        self._partition = [list(group) for group in groups]
        self._apply()

    def _apply(self) -> None:
        rules = [rule.rule() for rule in self._one_way]
        for group in self._partition:
            others = [port for other in self._partition if other is not group for port in other]
            if group and others:
                rules.append(f"iifname {_name_set(group)} oifname {_name_set(others)} drop")
        chain = "type filter hook forward priority 0"
        self.namespace.nft(ruleset("bridge", {"forward": (chain, rules)}))


def ruleset(family: str, chains: dict[str, tuple[str, list[str]]]) -> str:
    """The text that replaces the lab's table of a namespace by these chains, in one transaction."""
    body = "\n".join(
        f"chain {name} {{\n{kind}\n" + "".join(f"{rule}\n" for rule in rules) + "}"
        for name, (kind, rules) in chains.items()
    )
    # a delete fails when there is no table yet, which is why it is added first
    return f"add table {family} lab\ndelete table {family} lab\ntable {family} lab {{\n{body}\n}}\n"


def distinct(groups: Iterable[Iterable[Hashable]]) -> bool:
    """Whether no member is in two groups."""
    members = [member for group in groups for member in group]
    return len(members) == len(set(members))


def _name_set(ports: Iterable[str]) -> str:
    return "{ " + ", ".join(f'"{port}"' for port in ports) + " }"


def _has_br_netfilter() -> bool:
    return Path("/proc/sys/net/bridge").is_dir()
