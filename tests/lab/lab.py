"""Real hosts on one machine, for tests: each has its own network stack, host name and processes.

A lab needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), iproute2, nftables and util-linux. All of it exists in
anonymous namespaces: nothing is named, so labs never meet, and nothing of a lab outlives the test process,
even one killed with SIGKILL.

    with Lab() as lab:
        lan = lab.network("10.77.0.0/24")
        hosts = [lab.host(lan) for _ in range(4)]
        ranks = [host.start(train, rank) for rank, host in enumerate(hosts)]
        hosts[3].drop_udp(30)
        assert ranks[0].result() == 4
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import LabError
from .host import Host
from .messages import DropNamespaces
from .network import TOOLS, Network, distinct
from .zygote_client import ZygoteClient, shared_zygote


def why_unavailable() -> str | None:
    """What this machine lacks for a lab, and how to get it, or None if it lacks nothing."""
    if not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
        return "the lab needs Linux with network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root to make network namespaces: run the tests as root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return (
            f"the lab needs {', '.join(missing)}: install iproute2, nftables and util-linux "
            "(`apt-get install iproute2 nftables util-linux`)"
        )
    return None


class Lab:
    """A set of networks and hosts; all of it ends with the ``with`` block, also when that raises."""

    def __init__(self, zygote: ZygoteClient | None = None) -> None:
        self.networks: list[Network] = []
        self.hosts: list[Host] = []
        self._zygote = zygote or shared_zygote()
        self._directory: Path | None = None

    def __enter__(self) -> Lab:  # noqa: PYI034 - Self came with Python 3.11
        self._directory = Path(tempfile.mkdtemp(dir=self._zygote.directory))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def network(
        self,
        ipv4: str | None = "10.77.0.0/24",
        *,
        ipv6: str | None = None,
        snooping: bool = False,
        querier: bool = False,
        link_local: bool = True,
    ) -> Network:
        """Make a network.

        Args:
            ipv4: its subnet, or None.
            ipv6: its subnet, or None.
            snooping: whether the bridge forwards multicast only where it heard a membership report.
            querier: whether it asks for reports, without which snooping forgets.
            link_local: whether hosts have IPv6 link-local addresses, as real ones have.
        """
        network = Network(
            self._zygote,
            len(self.networks),
            ipv4,
            ipv6,
            snooping=snooping,
            querier=querier,
            link_local=link_local,
        )
        self.networks.append(network)
        return network

    def host(self, *networks: Network, name: str | None = None, interfaces: Sequence[str] | None = None) -> Host:
        """Make a host with a NIC on each network, named as told, and its default routes on the first."""
        if self._directory is None:
            raise LabError("a lab makes hosts inside its `with` block only")
        if interfaces is not None and len(interfaces) != len(networks):
            raise LabError(f"{len(networks)} networks need as many interface names, not {len(interfaces)}")
        name = name or f"host{len(self.hosts) + 1}"
        if any(host.name == name for host in self.hosts):
            raise LabError(f"there is a host {name!r} in this lab already")
        host = Host(self._zygote, name, self._directory / name)
        self.hosts.append(host)
        for index, network in enumerate(networks):
            host.attach(network, None if interfaces is None else interfaces[index])
        return host

    def lan(self, count: int, ipv4: str | None = "10.77.0.0/24", **settings: Any) -> list[Host]:
        """Make a network, with the settings of `network`, and so many hosts on it."""
        network = self.network(ipv4, **settings)
        return [self.host(network) for _ in range(count)]

    def split(self, network: Network, *groups: Collection[Host]) -> None:
        """Part a network: hosts of different groups hear nothing of each other; those in none hear all."""
        if not distinct(groups):
            raise LabError("a host can be on one side of a split only")
        network.partition([host.nic(network).port for host in group] for group in groups)

    def join(self, network: Network) -> None:
        """Undo `split`."""
        network.partition([])

    def describe(self) -> str:
        """Every process, with its output and events, for the message of a failed test."""
        return "\n".join(process.describe() for host in self.hosts for process in host.processes)

    def close(self) -> None:
        """Kill what runs, and let go of all namespaces and files; idempotent."""
        namespaces = [host.namespace for host in self.hosts]
        namespaces += [network.namespace for network in self.networks]
        try:
            if namespaces:
                self._zygote.command(DropNamespaces([namespace.key for namespace in namespaces]))
        finally:
            for host in self.hosts:
                host.close()
            self.hosts.clear()
            self.networks.clear()
            if self._directory is not None:
                shutil.rmtree(self._directory)
                self._directory = None
