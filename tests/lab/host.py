"""A host of the lab: its namespaces, its NICs, and the processes that a test starts in it."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar

from .errors import LabError
from .messages import KillProcesses, Spawn, Spawned
from .network import Network, NetworkNamespace, ruleset
from .process import Process, Rank
from .zygote_client import ZygoteClient

MODULES = os.pathsep.join(str(Path(__file__).parents[depth] / name) for depth, name in ((0, "whole_lines"), (2, "src")))
"""The ``PYTHONPATH`` of programs: the package, installed or not, and what keeps their lines whole."""

T = TypeVar("T")
Direction = Literal["in", "out"]

UDP = "meta l4proto udp"
"""A match of `Host.isolate_one_way` and `Host.drop`: UDP over IPv4 and IPv6, not ARP, ND and TCP."""

# Addresses and link-local addresses are usable at once, without a second of duplicate address detection.
_SYSCTLS = {
    f"net/ipv6/conf/{interface}/{name}": "0"
    for interface in ("all", "default")
    for name in ("accept_dad", "dad_transmits", "router_solicitations")
}

_SHOWS_THE_CLOUD = (
    *(f"/sys/class/dmi/id/{name}" for name in ("sys_vendor", "product_name", "chassis_asset_tag")),
    "/run/cloud-init/cloud-id",
)
"""What of the machine that runs the lab shows a cloud; hosts of the lab have none."""


@dataclass(frozen=True)
class Nic:
    """One interface of a host and the port of the bridge at its other end."""

    network: Network
    interface: str
    port: str
    ipv4: str | None
    ipv6: str | None


class Host:
    """Made by `Lab.host`.

    Attributes:
        name: what ``socket.gethostname()`` returns inside; it resolves to the first address of the first NIC.
        hosts_file: the file seen as /etc/hosts inside; a test may write to it (in place: it is mounted).
        resolver_file: likewise /etc/resolv.conf, empty at first.
        processes: all that were started here, in order.
    """

    def __init__(self, zygote: ZygoteClient, name: str, directory: Path) -> None:
        self.name = name
        self.processes: list[Process] = []
        self._zygote = zygote
        self._directory = directory
        self._nics: dict[Network, Nic] = {}
        self._rules: dict[Direction, list[str]] = {"in": [], "out": []}
        self._interfaces = 0
        directory.mkdir()
        self.hosts_file = directory / "hosts"
        self.hosts_file.write_text("127.0.0.1 localhost\n")
        # Without a name server every look-up fails at once; with the machine's it would wait for a time-out.
        self.resolver_file = resolver = directory / "resolv.conf"
        resolver.touch()
        nothing = directory / "nothing"
        nothing.touch()
        files = {
            seen: str(file)
            for seen, file in (
                ("/etc/hosts", self.hosts_file),
                ("/etc/resolv.conf", resolver),
                *((seen, nothing) for seen in _SHOWS_THE_CLOUD),
            )
            if Path(seen).exists()
        }
        self.namespace = NetworkNamespace.make(zygote, name, _SYSCTLS, files)
        self.namespace.ip("link set lo up")

    def __repr__(self) -> str:
        return f"<host {self.name}: {', '.join(nic.interface for nic in self._nics.values()) or 'no NIC'}>"

    def attach(self, network: Network, interface: str | None = None) -> None:
        """Add a NIC on ``network``, named ethN unless a name is given, with an address of each subnet.

        The first NIC gets the default routes. Also while processes run: a cable that is plugged in.
        """
        if network in self._nics:
            raise LabError(f"{self!r} is on {network!r} already")
        number, port = network.next_port()
        name = interface or f"eth{self._interfaces}"
        self._interfaces += 1
        nic = Nic(
            network,
            name,
            port,
            None if network.ipv4 is None else str(network.ipv4[number]),
            None if network.ipv6 is None else str(network.ipv6[number]),
        )
        commands = [f"link add {name} type veth peer name {port} netns {network.namespace.path}"]
        if not network.link_local:
            commands.append(f"link set {name} addrgenmode none")
        commands.append(f"link set {name} up")
        for address, subnet in ((nic.ipv4, network.ipv4), (nic.ipv6, network.ipv6)):
            if address is not None and subnet is not None:
                nodad = "nodad" if subnet.version == 6 else ""
                commands.append(f"address add {address}/{subnet.prefixlen} dev {name} {nodad}")
                if not self._nics:
                    default = "0.0.0.0/0" if subnet.version == 4 else "::/0"
                    commands.append(f"route add {default} dev {name}")
        self.namespace.ip(*commands)
        network.plug(port)
        network.wait_forwarding([port])
        first_address = nic.ipv4 or nic.ipv6
        if not self._nics and first_address is not None:
            self.hosts_file.write_text(f"127.0.0.1 localhost\n{first_address} {self.name}\n")
        self._nics[network] = nic

    def detach(self, network: Network | None = None) -> None:
        """Remove the NIC on ``network`` (the only or first one by default), interface and all."""
        nic = self._nic(network)
        nic.network.clear_one_way(nic.port)
        self.namespace.ip(f"link delete {nic.interface}")
        del self._nics[nic.network]

    def nic(self, network: Network | None = None) -> Nic:
        """The NIC on ``network``, by default the first one."""
        return self._nic(network)

    def address(self, network: Network | None = None, family: Literal[4, 6] | None = None) -> str:
        """Its address on ``network`` (by default the first): of this family, or IPv4 if it has that."""
        nic = self._nic(network)
        address = {4: nic.ipv4, 6: nic.ipv6, None: nic.ipv4 or nic.ipv6}[family]
        if address is None:
            raise LabError(f"{self!r} has no such address on {nic.network!r}")
        return address

    def interface(self, network: Network | None = None) -> str:
        """The name of its NIC on ``network``, by default the first one."""
        return self._nic(network).interface

    def ip(self, *commands: str) -> None:
        """Run commands of ip(8) inside, without the word ``ip``: ``host.ip("link set eth0 down")``."""
        self.namespace.ip(*commands)

    def drop(self, match: str, direction: Direction = "in") -> None:
        """Drop arriving (or leaving) packets that match this text of nft(8), IPv4 and IPv6, unseen by sockets.

        What is dropped on its way out is an error to its sender (EPERM), as with any local firewall.
        """
        self._set_rules({**self._rules, direction: [*self._rules[direction], f"{match} drop"]})

    def reject(self, hosts: Iterable[Host], how: Literal["reset", "icmp"]) -> None:
        """Answer these hosts' packets as a firewall's REJECT does: TCP with a reset, or all with ICMP.

        Resets and ICMP pass, so the other side sees what a process that has ended would make it see.
        """
        links = [host.namespace.tool(["ip", "-j", "link", "show", host.interface()]) for host in hosts]
        them = f"ether saddr {{ {', '.join(json.loads(link)[0]['address'] for link in links)} }}"
        answers = {"reset": "meta l4proto tcp reject with tcp reset", "icmp": "reject with icmpx type port-unreachable"}
        rules = [
            f"{them} tcp flags & rst == rst accept",
            f"{them} meta l4proto {{ icmp, ipv6-icmp }} accept",
            f"{them} {answers[how]}",
            f"{them} drop",
        ]
        self._set_rules({**self._rules, "in": [*self._rules["in"], *rules]})

    def drop_multicast(self) -> None:
        """Let no multicast in or out, on no interface: a network that carries none."""
        for match in ("ip daddr 224.0.0.0/4", f"ip6 daddr ff00::/8 {UDP}"):  # neighbour discovery stays
            self.drop(match, "in")
            self.drop(match, "out")

    def drop_udp(self, percent: int) -> None:
        """Drop each arriving UDP packet with this probability; loopback, which no network loses, is spared."""
        self.drop(f'iifname != "lo" {UDP} numgen random mod 100 < {percent}')

    def forward(self, rule: str) -> None:
        """Make a router of this host, which translates what comes in by a rule of nft(8)'s prerouting hook."""
        self.namespace.tool(["sysctl", "-qw", "net.ipv4.ip_forward=1"])
        self.namespace.nft(ruleset("ip", {"translate": ("type nat hook prerouting priority dstnat", [rule])}))

    def clear_rules(self) -> None:
        """Take back every `drop` and `drop_udp`."""
        self._set_rules({"in": [], "out": []})

    def cut(self, network: Network | None = None) -> None:
        """Pull the cable of ``network`` (all cables by default): the carrier goes."""
        for nic in self._chosen(network):
            nic.network.set_port(nic.port, up=False)

    def heal(self, network: Network | None = None) -> None:
        """Undo `cut` and `isolate_one_way`; the network forwards again when this returns."""
        for nic in self._chosen(network):
            nic.network.clear_one_way(nic.port)
            nic.network.set_port(nic.port, up=True)

    def isolate_one_way(self, direction: Direction, network: Network | None = None, match: str = "") -> None:
        """Lose silently, in the network, what goes to this host (``in``) or comes from it (``out``).

        The carrier stays. ``match`` narrows it down, in the words of nft(8)'s bridge family: `UDP`, or
        ``meta pkttype multicast``; without it ARP and neighbour discovery are lost as well. `heal` ends it.
        """
        for nic in self._chosen(network):
            nic.network.drop_one_way(nic.port, direction, match)

    def start(
        self,
        function: Callable[..., T],
        /,
        *args: Any,
        env: Mapping[str, str | None] | None = None,
        **kwargs: Any,
    ) -> Rank[T]:
        """Run a function of a test module in a new process of this host, forked from the zygote.

        ``function`` and its arguments are pickled, so it is defined at the top level of its module. The
        process has the environment that the tests were started with, less what steers mingle and
        torch.distributed, plus ``env`` (None removes a variable).
        """
        ours, theirs = socket.socketpair()
        with theirs:
            call = pickle.dumps((function, args, kwargs))
            try:
                pid, stdout, stderr = self._spawn(call, [], env, None, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        title = f"rank {function.__name__} on {self.name}"
        rank: Rank[T] = Rank(self._zygote, title, pid, stdout, stderr, Connection(ours.detach()))
        self.processes.append(rank)
        return rank

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Run a program in this host, by default in the root of the repository.

        The scripts of the tests' own environment (``python``, ``torchrun``, ``mingle-discover``) are found
        first, and the package is importable whether installed or not. What Python programs print is in `stdout`
        line by line, those of several processes too.
        """
        words = [str(word) for word in command]
        scripts = str(Path(sys.executable).parent)
        path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
        pid, stdout, stderr = self._spawn(None, words, {"PATH": path, "PYTHONPATH": MODULES, **(env or {})}, cwd, [])
        process = Process(self._zygote, f"{Path(words[0]).name} on {self.name}", pid, stdout, stderr)
        self.processes.append(process)
        return process

    def kill(self) -> None:
        """End every process of this host with SIGKILL, forked and adopted ones too; its network stays.

        For a machine that loses power, `cut` it first: otherwise its kernel closes the connections in good
        order.
        """
        self._zygote.command(KillProcesses([self.namespace.key]))
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """Let go of the channels of its ranks."""
        for process in self.processes:
            if isinstance(process, Rank):
                process.close()

    def _spawn(
        self,
        call: bytes | None,
        command: list[str],
        env: Mapping[str, str | None] | None,
        cwd: Path | None,
        descriptors: list[int],
    ) -> tuple[int, Path, Path]:
        if not self._directory.is_dir():
            raise LabError("the lab of this host is closed: use its hosts inside its `with` block only")
        number = len(self.processes)
        stdout, stderr = (self._directory / f"{number}.{stream}" for stream in ("stdout", "stderr"))
        for file in (stdout, stderr):
            file.touch()
        directory = str(cwd or Path(__file__).parents[2])
        request = Spawn(self.namespace.key, call, command, dict(env or {}), directory, str(stdout), str(stderr))
        return self._zygote.request(request, Spawned, descriptors).pid, stdout, stderr

    def _set_rules(self, rules: dict[Direction, list[str]]) -> None:
        chains = {
            f"{direction}put": (f"type filter hook {direction}put priority 0", every)
            for direction, every in rules.items()
        }
        self.namespace.nft(ruleset("inet", chains))
        self._rules = rules

    def _nic(self, network: Network | None) -> Nic:
        if network is None:
            if not self._nics:
                raise LabError(f"{self!r} is on no network")
            return next(iter(self._nics.values()))
        if network not in self._nics:
            raise LabError(f"{self!r} is not on {network!r}")
        return self._nics[network]

    def _chosen(self, network: Network | None) -> list[Nic]:
        return list(self._nics.values()) if network is None else [self._nic(network)]
