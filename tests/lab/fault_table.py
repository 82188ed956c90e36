"""The table of the faults in `faults`: for each the words that name its true cause.

``docs/troubleshooting.md`` has a section for each, with its title as heading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import Lab
from .faults import (
    Said,
    another_version,
    flooding_off,
    interface_down,
    interface_missing,
    interface_without_address,
    master_addr,
    membership_limit,
    missing_rank,
    mistyped_job_id,
    name_server_silent,
    network_not_shared,
    no_default_route,
    only_loopback,
    other_firewall,
    own_firewall,
    own_name_is_loopback,
    peer_without_address,
    port_shared,
    port_taken,
    rank_twice,
    rank_zero_tcp,
    reverse_path_filter,
    sbatch_body,
    secret_on_one_side,
    secrets_differ,
    two_rank_zeros,
    workers_tcp,
    world_sizes,
)


@dataclass(frozen=True)
class Fault:
    """One row: the words that each must say."""

    title: str
    make: Callable[[Lab], Said]
    words: Mapping[str, tuple[str, ...]]


FORMED = ("the job has formed",)
FAULTS = (
    Fault(
        "a mistyped job id",
        mistyped_job_id,
        {"init": ("mistyped job id: 'resnet'",), "list": ("resnet", "resent")},
    ),
    Fault(
        "a missing rank",
        missing_rank,
        {"init": ("missing ranks: 2",), "list": ("2/3\t2\t",)},
    ),
    Fault(
        "a rank twice",
        rank_twice,
        {"init": ("is already taken by rank 1", "the same rank was started twice"), "list": ("resnet",)},
    ),
    Fault(
        "two rank 0s",
        two_rank_zeros,
        {"init": ("more than one rank 0", "host1", "host2"), "list": ("host1", "host2")},
    ),
    Fault(
        "different world sizes",
        world_sizes,
        {"init": ("world_size=2", "different world sizes"), "list": ("1/3",)},
    ),
    Fault(
        "Torch waits 10 seconds for each connection",
        name_server_silent,
        {"doctor": ("WARN\tnames", "10.77.0.1 does not answer name queries: torch waits 10 s for each connection")},
    ),
    Fault(
        "multicast dropped by this host's firewall",
        own_firewall,
        {
            "init": ("likely cause: this host's firewall drops multicast", "ct state new meta l4proto udp drop"),
            "doctor": (
                "FAIL\tmulticast",
                "ct state new meta l4proto udp drop",
                "nft insert rule inet lab input ip saddr 10.77.0.0/24 udp dport 29499 accept",
            ),
            "ping": ("multicast to host1 (10.77.0.1) is lost, unicast fine", "this host's firewall drops multicast"),
        },
    ),
    Fault(
        "UDP dropped by the other host's firewall",
        other_firewall,
        {
            "init": ("rank 1 on host host2", "heard but not joined", "Its host's firewall"),
            "doctor --check": (
                "multicast and unicast UDP to host2 (10.77.0.2) are lost: the firewall of host2 drops UDP port 29499",
            ),
            "ping": ("multicast and unicast UDP to host2 (10.77.0.2) are lost",),
        },
    ),
    Fault(
        "rank 0's TCP port filtered: heard, not reachable",
        rank_zero_tcp,
        {
            "init": ("rank 1 on host host2", "hears rank 0 on host host1 (10.77.0.1)", "does not reach it over TCP"),
            "doctor": ("WARN\ttcp", "meta l4proto tcp drop", "saddr 10.77.0.0/24 meta l4proto tcp accept"),
            "ping": ("TCP from host2 to host1 (10.77.0.1) is filtered",),
        },
    ),
    Fault(
        "the named interface missing",
        interface_missing,
        {"init": ("'eth7'", "eth0"), "doctor": ("FAIL", "'eth7'")},
    ),
    Fault(
        "the named interface down",
        interface_down,
        {"init": ("down",), "doctor": ("FAIL\tinterfaces", "down")},
    ),
    Fault(
        "the named interface without an address",
        interface_without_address,
        {"init": ("no IPv4 or IPv6 address",), "doctor": ("FAIL\tinterfaces", "no IPv4 or IPv6 address")},
    ),
    Fault(
        "the secrets differ",
        secrets_differ,
        {"init": ("AuthenticationError", "another one"), "ping": ("host2 (10.77.0.2)", "another secret")},
    ),
    Fault(
        "one side without a secret",
        secret_on_one_side,
        {"init": ("AuthenticationError", "has none"), "ping": ("host2 (10.77.0.2)", "only one side has a secret")},
    ),
    Fault(
        "the UDP port held by another program",
        port_taken,
        {"init": ("UDP port 29499 is held by pid", "python"), "doctor": ("FAIL", "is held by pid", "python")},
    ),
    Fault(
        "the UDP port shared with a program that swallows unicast",
        port_shared,
        {
            "init": ("is also held by pid", "a unicast datagram to a shared port reaches only one program"),
            "doctor": ("WARN\tport", "is also held by pid", "MINGLE_PEERS may not work"),
        },
    ),
    Fault(
        "the reverse path filter drops the peer's subnet",
        reverse_path_filter,
        {
            "init": ("the reverse path filter of eth0 has dropped", "net.ipv4.conf.eth0.rp_filter=2"),
            "doctor": ("FAIL\trp_filter", "sysctl -w net.ipv4.conf.eth0.rp_filter=2"),
        },
    ),
    Fault(
        "no default route",
        no_default_route,
        {
            "init": ("Network is unreachable (ENETUNREACH)", "ip route add default dev eth0"),
            "doctor": ("no default route",),
        },
    ),
    Fault(
        "only loopback up",
        only_loopback,
        {"init": ("only loopback is used",), "doctor": ("WARN\tinterfaces\tonly loopback is used",)},
    ),
    Fault(
        "two networks, and the chosen one is not shared",
        network_not_shared,
        {
            "init": ("MINGLE_INTERFACE names eth0 alone", "eth1 10.88.0.1/24 is up as well"),
            "doctor": ("host2 (10.88.0.2) is reached by eth1, but only eth0 is used here",),
        },
    ),
    Fault(
        "MASTER_ADDR already set to something else",
        master_addr,
        {
            "init": (*FORMED, "MASTER_ADDR=10.9.9.9"),
            "doctor": ("MASTER_ADDR=10.9.9.9", "unset MASTER_ADDR MASTER_PORT"),
        },
    ),
    Fault(
        "the host's own name resolves to 127.0.1.1",
        own_name_is_loopback,
        {"init": FORMED, "doctor": ("WARN\thostname", "resolves to 127.0.1.1")},
    ),
    Fault(
        "the membership limit is reached",
        membership_limit,
        {
            "init": ("limit of multicast memberships", "igmp_max_memberships=1", "sysctl -w"),
            "doctor": ("FAIL", "igmp_max_memberships=1", "sysctl -w net.ipv4.igmp_max_memberships=20"),
        },
    ),
    Fault(
        "python in an sbatch body without srun",
        sbatch_body,
        {"init": ("LauncherError", "srun"), "doctor": ("FAIL\tenvironment", "srun"), "env": ("conflict:", "srun")},
    ),
    Fault(
        "an incompatible protocol version on the network",
        another_version,
        {
            "init": ("another protocol version 2", "an incompatible mingle"),
            "doctor": ("WARN\tversion\t10.77.0.1 speaks version 2",),
            "ping": ("10.77.0.1 speaks version 2",),
        },
    ),
    Fault(
        "multicast flooding off on the bridge",
        flooding_off,
        {
            "init": (
                "carries no multicast",
                "a switch with IGMP snooping drops it",
            ),
            "doctor --check": ("is lost on 239.x and passes on 224.0.0.x", "mcast_snooping 0"),
            "ping": ("is lost on 239.x and passes on 224.0.0.x, unicast fine",),
        },
    ),
    Fault(
        "a name in MINGLE_PEERS that does not resolve",
        peer_without_address,
        {
            "init": ("'node-17' in MINGLE_PEERS does not resolve", "getent hosts node-17"),
            "doctor": ("FAIL\tpeers\t'node-17' in MINGLE_PEERS does not resolve",),
        },
    ),
    Fault(
        "TCP between two workers filtered while both reach rank 0",
        workers_tcp,
        {
            "init": (
                "ConnectivityError",
                "rank 1 on host host2 (10.77.0.2 on eth0) and rank 2 on host host3 (10.77.0.3 on eth0) do not reach",
                "on host3 (torch needs all TCP ports):\n    nft insert rule",
            ),
            "ping": ("TCP from host2 to host3 (10.77.0.3) is filtered", "though UDP passes"),
        },
    ),
)
