"""The table of causes: what was observed, and the likely cause that each ladder names for it.

``tests/docs/test_causes.py`` runs each row. The first row that applies counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from mingle.cli import jobs
from mingle.cli.checks import judge, why_unheard
from mingle.diagnostics import Detour, Finding, diagnosis
from mingle.diagnostics.diagnosis import Facts, Holder
from mingle.diagnostics.firewall import Chain
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Nodes, Policy
from mingle.observe.lookup import not_found
from mingle.protocol.explain.deadline import timeout
from mingle.protocol.explain.observations import Agents, Diagnostics, Gone, NetworkFacts, Situation, Unreached
from mingle.wire.datagrams import Offer, Seek
from mingle.wire.echo import EchoRequest
from mingle.wire.frames import ProcessInfo, Status
from tests.support.bystanders import Wire
from tests.support.ping_lan import Lan, echo_heard


def _offer() -> Offer:
    return Offer(job="resnet", session=b"S" * 16, host=b"H" * 16, addresses=("10.0.0.9",), port=5000, world_size=2)


HEALTHY = Facts(port=29499, used=["eth0 10.0.0.5/24"], used_names=["eth0"], networks=["10.0.0.0/24"])
NO_ROUTE = replace(HEALTHY, default_route=False)
LOOPBACK = Facts(port=29499, used=["lo 127.0.0.1/8"], used_names=["lo"], only_loopback=True)
LEFT_OVER = replace(LOOPBACK, unused=["eth0 10.0.0.5/24"], named_by="MINGLE_INTERFACE")
OFFLINE = replace(HEALTHY, lost={"eth0": "is down"}, had_carrier=True)
NAMED = replace(HEALTHY, unused=["eth1 10.1.0.5/24"], named_by="MINGLE_INTERFACE")
OTHER_PORT = replace(HEALTHY, port=31000)
NO_TTL = replace(HEALTHY, ttl=0)
ONE_FAMILY = replace(HEALTHY, family="6")
SHARED_PORT = replace(HEALTHY, holders=[Holder(99, "telemetry", 0)])
DROPPED = replace(HEALTHY, multicasts_on=frozenset(), send_errors={"EPERM": 6})
DROPPED_WITH_PEERS = replace(DROPPED, other_way="peers")
DROPPED_WITH_FOLDER = replace(DROPPED, other_way="folder")
EMPTY_FOLDER = replace(DROPPED_WITH_FOLDER, empty_folders=["dir:/shared/mingle"])
NO_PORT = {"eth0 IPv4": "no port is free (EADDRINUSE: Address already in use)"}
PORTLESS = replace(HEALTHY, failures=NO_PORT, port_range=(40000, 40003))
NO_TCP = replace(HEALTHY, chains=[Chain("inet", "filter", "input", "input", "drop")])
ASTRAY = replace(HEALTHY, used=["eth1"], used_names=["eth1"], detours=[Detour("10.0.0.1", "eth1", "eth0")])
TWO_USED = replace(HEALTHY, used=["eth0", "eth1"], used_names=[])
HEARD_ELSEWHERE = replace(TWO_USED, detours=[Detour("169.254.1.2", "eth1", "eth0", heard=True)])
SURE = replace(NO_ROUTE, send_errors={"ENETUNREACH": 3})

NAMES_ITSELF = replace(HEALTHY, peers=["10.0.0.5"], peers_named=True, names_itself=True)
POD = replace(HEALTHY, surroundings="pod")
CONTAINER = replace(HEALTHY, surroundings="container")
CLOUD = replace(HEALTHY, surroundings="Amazon EC2")
SLOW_NAMES = replace(HEALTHY, silent_servers=["10.0.0.53"], look_up_seconds=10.0)
WRONG_PEER = dict.fromkeys(("peers", "unanswered"), ("node0 = 10.0.0.9: no answer",))

HOST = "host node0 (10.0.0.1:40000), pid 7"
VERSION: Mapping[str, int] = {"version 9": 1}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: what was observed by whom, in words and as facts, and words of the cause that is named."""

    observed: str
    cause: str
    machine: Facts = HEALTHY
    network: Mapping[str, Any] = field(default_factory=dict)
    """Fields of what is known of the network."""
    heard: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the evidence, or for `find` what is heard."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    status: Status | None = None
    assigned: bool = False
    silent_host: bool = False
    """Whether the host took our connection and says nothing."""

    def facts(self) -> NetworkFacts:
        """What the driver gives to the report: the warnings and failures of the local checks among it."""
        found: list[Finding] = diagnosis.troubles(self.machine)
        port = self.machine.port
        rejected = Counter(self.rejected)
        return NetworkFacts(port=port, named_port=port != 29499, rejected=rejected, findings=found, **self.network)


def _situation(row: Row, status: Status | None, agents: Agents | None = None) -> Situation:
    return Situation(
        diagnostics=Diagnostics(**row.heard),
        job="resnet",
        rank=None if row.assigned else 0 if row.status is not None else 1,
        status=status,
        unit="rank" if agents is None else "node",
        connected=row.silent_host or status is not None,
        seconds=5.0,
        agents=agents,
    )


def rank_names(row: Row) -> str:
    """The cause in the error of a rank whose time is up."""
    return str(timeout(_situation(row, row.status), row.facts()).cause)


def agent_names(row: Row) -> str:
    """The same, of an agent."""
    status = row.status or Status(joined=1, world_size=4, lacks="1 more node: 2 to 4 are wanted")
    memory = Memory(Policy(nodes=Nodes(minimum=2, maximum=4), last_call=30.0))
    agents = memory.told(ProcessInfo(hostname="n", pid=1))
    return str(timeout(_situation(row, status, agents), row.facts()).cause)


def find_names(row: Row) -> str:
    """The same, of `mingle-discover find`."""
    wire = Wire()
    finder = wire.look()
    if "seeker" in row.heard:
        wire.hear("10.0.0.2", Seek(job="resnet", member=b"M" * 16, world_size=2, rank=1), "10.0.0.3")
    if "offer" in row.heard:
        wire.hear("10.0.0.2", _offer(), "10.0.0.9")
        finder.sessions[0].was_alive = row.heard["offer"] == "was alive"
    if "other" in row.heard:
        finder.diagnostics.other_jobs[row.heard["other"]] = "host two (10.0.0.2), pid 7"
    return str(not_found("resnet", finder, row.facts(), 5.0).cause)


def list_names(row: Row) -> str:
    """The same, of `mingle-discover list`."""
    return jobs.why_no_job(row.facts())[0]


def ping_names(row: Row) -> str:
    """The same, of `mingle-discover ping`."""
    machine = replace(row.machine, versions=dict.fromkeys(row.rejected, "192.0.2.66"))
    pings = Lan().add("10.0.0.1")
    if "job" in row.heard:
        hello = EchoRequest(job=row.heard["job"], pinger=b"P" * 16, number=1, way="multicast")
        pings.handle(echo_heard(hello, "192.0.2.66", size=640), 100.0)
    return why_unheard(judge(pings, machine))[0]


SEEKER = {b"A" * 16: "rank 2 on host node2 (10.0.0.2), pid 9"}
A_NODE = {b"A" * 16: "a node on host node2 (10.0.0.2), pid 9"}
A_PROCESS = {b"A" * 16: "a process without a rank on host node2 (10.0.0.2), pid 9"}
FAILED = "has failed: the store can't listen on 10.0.0.2:29400: Address already in use"
HAS_FAILED = {b"A" * 16: Gone(2, "node2", f"rank 2 on host node2 (10.0.0.2), pid 9 {FAILED}")}
ZERO_HAS_FAILED = {b"H" * 16: Gone(0, "node0", f"rank 0 on host node0 (10.0.0.1), pid 7 {FAILED}")}
NO_ANSWER = "10.0.0.2 no answer within 1 s"
NO_ROUTE_TO_US = "10.0.0.1 Network is unreachable (ENETUNREACH)"
DEAF = {
    (b"A" * 16, b"M" * 16): Unreached("rank 2 on host node2 (10.0.0.2), pid 9", "rank 0 on host node0, pid 7", "", 1.0)
}
APART = {
    (b"M" * 16, b"A" * 16): Unreached("host node1, pid 4", "host node2 (10.0.0.2), pid 9", NO_ANSWER, 1.0),
    (b"A" * 16, b"M" * 16): Unreached("host node2 (10.0.0.2), pid 9", "host node1, pid 4", NO_ANSWER, 1.0),
}
TO_HOST = {
    (b"M" * 16, b"H" * 16): Unreached(
        "rank 1 on host n, pid 1", "rank 0 on host node0 (10.0.0.1), pid 7", "10.0.0.1 no answer within 1 s", 1.0
    )
}
TO_HOST_PORTLESS = {
    pair: replace(each, how="10.0.0.1 Cannot assign requested address (EADDRNOTAVAIL)")
    for pair, each in TO_HOST.items()
}
TO_HOST_ASTRAY = {pair: replace(each, how="10.0.0.1 sent through eth0, not eth1") for pair, each in TO_HOST.items()}
TWO_NAMES = {"machines": {"10.0.0.2": {"node2": None, "node3": None}}}
ONE_NAME = {"machines": {"10.0.0.2": {"vm": None}}}
CLONES = {"neighbors": {"10.0.0.2": ["52:54:00:00:00:02", "52:54:00:00:00:03"]}}
OUR_HARDWARE = {"neighbors": {"10.0.0.2": ["52:54:00:00:00:01"]}, "hardware": {"52:54:00:00:00:01": "eth0"}}
SAME_HARDWARE = {"neighbors": {"10.0.0.2": ["52:54:00:00:00:01"], "10.0.0.3": ["52:54:00:00:00:01"]}}
NO_ARP: Mapping[str, Any] = {"neighbors": {"10.0.0.2": []}}
TWIN = {b"A" * 16: "rank 1 on host node2 (10.0.0.2), pid 9"}
TWINS = SEEKER | {b"B" * 16: "rank 2 on host node3 (10.0.0.3), pid 5"}
OURS = {"hostname": "node1", "addresses": ["10.0.0.2"]}
TYPO = {"resent": "host node9 (10.0.0.9), pid 4"}
OTHER = {"bert": "host node9 (10.0.0.9), pid 4"}
SECRET = {"10.0.0.2: secret: it has another one": None}
LACKING = Status(joined=2, world_size=4, missing=(2, 3))
GONE = Status(joined=3, world_size=4, departed=(2,), left=("rank 2 on host node2 (10.0.0.2), pid 9: reset",))
ALONE = Status(joined=1, world_size=4, missing=(1, 2, 3))
PAIR = Status(joined=2, world_size=4, lacks="1 more node: 3 to 4 are wanted")

RANKS = (
    Row(
        observed="a rank was refused",
        status=Status(joined=2, world_size=4, missing=(2, 3), refused=("rank 2: world size",)),
        machine=SURE,
        cause="settings that contradict the others",
    ),
    Row(
        observed="all ranks have joined and some do not answer, and a process too many was refused",
        status=Status(joined=4, world_size=4, unconfirmed=(2, 3), refused=("host x: full",)),
        cause="those processes are stopped, or their network was cut, or loses packets",
    ),
    Row(
        observed="a missing rank said that it failed",
        status=LACKING,
        heard={"failed": HAS_FAILED, "seekers": SEEKER},
        cause="rank 2 on host node2 (10.0.0.2), pid 9 has failed: the store can't listen",
    ),
    Row(
        observed="a rank came, went, and is not back",
        status=Status(joined=3, world_size=4, departed=(2,), left=("rank 2 on host x: reset",)),
        cause="a rank crashed or was stopped",
    ),
    Row(
        observed="a rank came, went, and is not back, and two machines were heard under its address",
        status=GONE,
        heard=TWO_NAMES,
        cause="host node2 and host node3 use the same address 10.0.0.2",
    ),
    Row(
        observed="the same, and the machines have one name, as clones do: its address had two hardware addresses",
        status=GONE,
        heard=ONE_NAME,
        network=CLONES,
        cause="two machines use the address 10.0.0.2: its hardware address is 52:54:00:00:00:02 and",
    ),
    Row(
        observed="the same, and its address is an address of this machine",
        status=GONE,
        network=OURS,
        cause="the address 10.0.0.2 of host node2 is also an address of this one, node1",
    ),
    Row(
        observed="a rank came, its connection timed out, and it is not back",
        status=Status(joined=3, world_size=4, departed=(2,), left=("rank 2 on host x: timed out (ETIMEDOUT)",)),
        cause="its machine is down, or its network was cut or loses packets",
    ),
    Row(
        observed="ranks are missing, and one was started twice",
        status=replace(LACKING, refused=("rank 1 on host x, pid 2: rank taken (rank 1 is held by a live process)",)),
        cause="a rank was started twice: rank 1 on host x, pid 2",
    ),
    Row(
        observed="ranks are assigned, some are missing, and nothing else is observed",
        status=Status(joined=2, world_size=4),
        assigned=True,
        cause="the missing ranks were not started, run alone with a world size of 1, or can't reach rank 0",
    ),
    Row(
        observed="ranks are assigned, and a process left since its own time was up",
        status=Status(joined=1, world_size=4, left=("host x, pid 2: DiscoveryTimeoutError",)),
        assigned=True,
        cause="the missing ranks were not started",
    ),
    Row(
        observed="a rank came, went and came back; then another one does not answer",
        status=Status(joined=4, world_size=4, left=("rank 2 on host x: reset",), phase="confirming", unconfirmed=(3,)),
        cause="those processes are stopped",
    ),
    Row(
        observed="all ranks joined, and one does not answer",
        status=Status(joined=4, world_size=4, phase="confirming", unconfirmed=(3,)),
        machine=NO_ROUTE,
        cause="those processes are stopped",
    ),
    Row(
        observed="all ranks joined, and rank 0's store is not reached from here",
        status=Status(joined=4, world_size=4, phase="sealed", unconfirmed=(0,)),
        heard={"store_failures": {"10.0.0.1:4567": "Connection timed out"}},
        cause="the store at 10.0.0.1:4567 is not reached from this host (Connection timed out)",
    ),
    Row(
        observed="a missing rank hears rank 0 and can't connect to it",
        status=LACKING,
        heard={"seekers": SEEKER, "unreached": DEAF},
        machine=SURE,
        cause="rank 2 on host node2 (10.0.0.2), pid 9 hears rank 0 on host node0, pid 7 and does not reach it over TCP",
    ),
    Row(
        observed="the same, and it has no route to rank 0",
        status=LACKING,
        heard={"seekers": SEEKER, "unreached": {p: replace(each, how=NO_ROUTE_TO_US) for p, each in DEAF.items()}},
        cause="(10.0.0.1 Network is unreachable (ENETUNREACH)): it has no route to that address",
    ),
    Row(
        observed="ranks are assigned, and two hosts of the job can't connect to each other",
        status=Status(joined=1, world_size=4),
        assigned=True,
        heard={"seekers": A_PROCESS, "unreached": APART},
        cause="host node1, pid 4 and host node2 (10.0.0.2), pid 9 hear each other and do not reach each other over TCP",
    ),
    Row(
        observed="the same, and another host told of the address, which does not answer ARP",
        status=Status(joined=1, world_size=4),
        assigned=True,
        heard={"unreached": APART},
        network=NO_ARP,
        cause="do not reach each other over TCP (10.0.0.2 no answer within 1 s): a firewall on one of them or between",
    ),
    Row(
        observed="the same, and this host's firewall drops TCP",
        status=Status(joined=1, world_size=4),
        assigned=True,
        machine=NO_TCP,
        heard={"member": b"M" * 16, "unreached": APART},
        cause="this host's firewall drops TCP from other hosts: policy drop of chain inet filter input",
    ),
    Row(
        observed="the same, and this host sends by another interface than that on which it heard the other one",
        status=Status(joined=1, world_size=4),
        assigned=True,
        machine=HEARD_ELSEWHERE,
        heard={"member": b"M" * 16, "unreached": APART},
        cause="the kernel sends to 169.254.1.2 through eth0, and 169.254.1.2 was heard on eth1",
    ),
    Row(
        observed="all ranks joined, one has not reached rank 0's store, and a name server does not answer",
        status=Status(joined=4, world_size=4, phase="sealed", unconfirmed=(3,)),
        machine=SLOW_NAMES,
        cause="10.0.0.53 does not answer name queries: torch waits 10 s for each connection",
    ),
    Row(
        observed="ranks are missing, and a check of this machine fails",
        status=LACKING,
        machine=SURE,
        cause="Network is unreachable",
    ),
    Row(
        observed="ranks are missing, and a process did not prove the secret",
        status=LACKING,
        heard={"secret_failures": SECRET},
        cause="without a secret or with another one",
    ),
    Row(
        observed="a missing rank was heard and has not joined",
        status=LACKING,
        heard={"seekers": SEEKER, "other_jobs": TYPO},
        machine=NO_ROUTE,
        cause="rank 2 on host node2 (10.0.0.2), pid 9: heard but not joined",
    ),
    Row(
        observed="a missing rank was heard and has not joined, and this host's firewall drops TCP",
        status=LACKING,
        heard={"seekers": SEEKER},
        machine=NO_TCP,
        cause="heard but not joined. This host's firewall drops TCP from other hosts: policy drop",
    ),
    Row(
        observed="the same, and two machines were heard under its address",
        status=LACKING,
        heard={"seekers": SEEKER, **TWO_NAMES},
        machine=NO_TCP,
        cause="heard but not joined. Host node2 and host node3 use the same address 10.0.0.2",
    ),
    Row(
        observed="the same, and it has our hardware address",
        status=LACKING,
        heard={"seekers": SEEKER},
        network=OUR_HARDWARE,
        cause="10.0.0.2 has the same hardware address as this machine's eth0 (52:54:00:00:00:01)",
    ),
    Row(
        observed="the same, and another machine has its hardware address",
        status=LACKING,
        heard={"seekers": SEEKER, "machines": {"10.0.0.2": {"node2": None}, "10.0.0.3": {"node3": None}}},
        network=SAME_HARDWARE,
        cause="10.0.0.2 has the same hardware address as 10.0.0.3 (52:54:00:00:00:01)",
    ),
    Row(
        observed="the same, and its address is in none of the subnets of this machine",
        status=LACKING,
        heard={"seekers": SEEKER, "off_link": {"10.0.0.2": None}, "machines": {"10.0.0.2": {"node2": None}}},
        cause="10.0.0.2 is on this network and in none of the subnets here",
    ),
    Row(
        observed="the same, and it does not answer ARP",
        status=LACKING,
        heard={"seekers": SEEKER, "machines": {"10.0.0.2": {"node2": None}}},
        network=NO_ARP,
        cause="10.0.0.2 is heard and does not answer ARP",
    ),
    Row(
        observed="the same, and it says that it can't connect to rank 0",
        status=LACKING,
        heard={"seekers": SEEKER, "unreached": DEAF},
        network=OUR_HARDWARE,
        cause="does not reach it over TCP: 10.0.0.2 has the same hardware address as this machine's eth0",
    ),
    Row(
        observed="ranks are missing, and this host's firewall drops multicast",
        status=LACKING,
        machine=DROPPED,
        cause="this host's firewall refused to send 6 datagrams",
    ),
    Row(
        observed="the same, and peers answer",
        status=LACKING,
        machine=DROPPED_WITH_PEERS,
        cause="the missing ranks were not started",
    ),
    Row(
        observed="the same, and others were seen in a shared folder",
        status=LACKING,
        machine=DROPPED_WITH_FOLDER,
        cause="the missing ranks were not started",
    ),
    Row(
        observed="the same, and a missing rank shows itself in the shared folder",
        status=replace(LACKING, seated=b"BBBBCCCC"),
        machine=DROPPED_WITH_FOLDER,
        network={"in_folders": {"dir:/shared/mingle": [b"A" * 16, b"B" * 16]}},
        cause="dir:/shared/mingle shows one process that looks for this job and can't connect to this host",
    ),
    Row(
        observed="rank 0 is alone, and no other process is seen in its shared folder",
        status=ALONE,
        machine=EMPTY_FOLDER,
        cause="no other process of this job is seen in dir:/shared/mingle",
    ),
    Row(
        observed="ranks are assigned, and more processes were heard than have joined",
        status=Status(joined=1, world_size=4),
        assigned=True,
        heard={"seekers": A_PROCESS},
        cause="a process without a rank on host node2 (10.0.0.2), pid 9: heard but not joined",
    ),
    Row(
        observed="the same, and a host of the job was reached over TCP",
        status=Status(joined=1, world_size=4),
        assigned=True,
        heard={"seekers": A_PROCESS, "hosts": {HOST: "proved"}, "proved": {HOST: None}},
        cause="heard but not joined. Host node0 (10.0.0.1:40000), pid 7 was reached over TCP, so the job may",
    ),
    Row(
        observed="ranks are missing, and another version of the protocol is heard",
        status=LACKING,
        rejected=VERSION,
        cause="an incompatible mingle",
    ),
    Row(
        observed="ranks are missing, and the same job is heard in another attempt of the launcher",
        status=LACKING,
        heard={"other_attempts": {"2": "10.0.0.3"}},
        cause="the launcher's attempt differs: '2'",
    ),
    Row(
        observed="ranks are missing, and a similar job id is heard; there is no default route",
        status=ALONE,
        heard={"other_jobs": TYPO},
        machine=NO_ROUTE,
        cause="a mistyped job id: 'resent'",
    ),
    Row(
        observed="ranks are missing, and a job id that resembles ours not at all is heard",
        status=ALONE,
        heard={"other_jobs": OTHER},
        cause="the missing ranks were not started, or can't reach rank 0",
    ),
    Row(
        observed="ranks are missing, others have joined, and there is no default route",
        status=LACKING,
        machine=NO_ROUTE,
        cause="the missing ranks were not started",
    ),
    Row(
        observed="ranks are missing, others have joined, and only loopback is up",
        status=LACKING,
        machine=LOOPBACK,
        cause="the missing ranks were not started",
    ),
    Row(
        observed="ranks are missing, others have joined, and this machine has gone offline",
        status=LACKING,
        machine=OFFLINE,
        cause="this machine is offline: eth0 is down",
    ),
    Row(
        observed="rank 0 is alone, no process is heard, and there is no default route",
        status=ALONE,
        machine=NO_ROUTE,
        cause="the missing ranks were not started, the network carries no multicast",
    ),
    Row(
        observed="rank 0 is alone, no process is heard, and only loopback is up",
        status=ALONE,
        machine=LOOPBACK,
        cause="only loopback is used",
    ),
    Row(
        observed="ranks are missing, others of this machine have joined, and MINGLE_INTERFACE is lo",
        status=LACKING,
        machine=LEFT_OVER,
        cause="the missing ranks were not started, or are on other machines: MINGLE_INTERFACE names loopback alone",
    ),
    Row(
        observed="rank 0 is alone, no process is heard, and its UDP port is not the default",
        status=ALONE,
        machine=OTHER_PORT,
        cause="the missing ranks were not started, or with another MINGLE_PORT than 31000",
    ),
    Row(
        observed="rank 0 is alone, no process is heard, and another program shares the UDP port",
        status=ALONE,
        machine=SHARED_PORT,
        cause="is also held by pid 99",
    ),
    Row(
        observed="ranks are missing, others have joined, in a Kubernetes pod without MINGLE_PEERS",
        status=LACKING,
        machine=POD,
        cause="this is a Kubernetes pod, and multicast rarely passes between nodes",
    ),
    Row(
        observed="rank 0 is alone, no process is heard, in a container without MINGLE_PEERS",
        status=ALONE,
        machine=CONTAINER,
        cause="this is a container, and multicast does not leave its machine's bridge",
    ),
    Row(
        observed="rank 0 is alone, no process is heard, on a machine of a cloud without MINGLE_PEERS",
        status=ALONE,
        machine=CLOUD,
        cause="this is a machine of Amazon EC2, and networks there rarely carry multicast",
    ),
    Row(
        observed="ranks are missing, others have joined, in a cloud where their multicast was heard",
        status=LACKING,
        machine=replace(CLOUD, multicast_heard=True),
        cause="the missing ranks were not started",
    ),
    Row(
        observed="rank 0 is alone, and a host of MINGLE_PEERS does not answer",
        status=ALONE,
        machine=replace(POD, peers_named=True),
        network=WRONG_PEER,
        cause="nothing has come from node0 = 10.0.0.9: no answer",
    ),
    Row(
        observed="rank 0 is alone, and no process is heard",
        status=ALONE,
        cause="the missing ranks were not started, the network carries no multicast",
    ),
    Row(observed="ranks are missing, and nothing else is observed", status=LACKING, cause="were not started"),
    Row(
        observed="rank 0 took the connection and does not answer",
        silent_host=True,
        machine=NO_ROUTE,
        cause="the host's process is stopped or hangs",
    ),
    Row(
        observed="rank 0 said that it failed, and other ranks wait, too",
        heard={"failed": ZERO_HAS_FAILED, "seekers": SEEKER},
        cause="rank 0 on host node0 (10.0.0.1), pid 7 has failed: the store can't listen",
    ),
    Row(
        observed="rank 0 was heard and no connection to it stood",
        heard={"hosts": {HOST: "not reached: 10.0.0.1 no proof within 1 s"}, "other_jobs": TYPO},
        machine=NO_ROUTE,
        cause="rank 0 was heard but could not be reached over TCP",
    ),
    Row(
        observed="the same, and two machines were heard under its address",
        heard={
            "hosts": {HOST: "not reached: 10.0.0.1 no proof within 1 s"},
            "machines": {"10.0.0.1": {"node0": None, "node5": None}},
        },
        cause="rank 0 was heard but could not be reached over TCP: host node0 and host node5 use the same address",
    ),
    Row(
        observed="rank 0 is heard, and this host has no free port for a connection to it",
        heard={"member": b"M" * 16, "unreached": TO_HOST_PORTLESS},
        cause="no port is free there for a connection to leave from (net.ipv4.ip_local_port_range)",
    ),
    Row(
        observed="a shared folder shows rank 0, and its address is an address of this machine",
        heard={"hosts": {HOST: "not reached: 10.0.0.1 Connection refused"}},
        network={"hostname": "node1", "addresses": ["10.0.0.1"]},
        cause="the address 10.0.0.1 of host node0 is also an address of this one, node1",
    ),
    Row(
        observed="rank 0 is heard, and was dialed twice in vain",
        heard={
            "member": b"M" * 16,
            "hosts": {HOST: "not reached: 10.0.0.1 no answer within 1 s"},
            "unreached": TO_HOST,
        },
        machine=NO_ROUTE,
        cause="rank 1 on host n, pid 1 hears rank 0 on host node0 (10.0.0.1), pid 7 and does not reach it over TCP",
    ),
    Row(
        observed="the same, and its datagrams come from an address that it does not announce",
        heard={"unreached": TO_HOST, "translated": {"10.0.0.1": "203.0.113.7"}},
        cause="host node0 announces 10.0.0.1, and its datagrams come from 203.0.113.7: address translation (NAT) hides",
    ),
    Row(
        observed="the same, and the kernel sends to it by another interface than the named one",
        heard={"hosts": {HOST: "not reached: 10.0.0.1 No route to host"}},
        machine=ASTRAY,
        cause="the kernel sends to 10.0.0.1 through eth0, and eth1 was named",
    ),
    Row(
        observed="the same, and it was dialed twice",
        heard={"member": b"M" * 16, "unreached": TO_HOST},
        machine=ASTRAY,
        cause="the kernel sends to 10.0.0.1 through eth0, and eth1 was named",
    ),
    Row(
        observed="another rank hears rank 0, and says that its kernel sends by another interface",
        status=LACKING,
        heard={"member": b"H" * 16, "unreached": TO_HOST_ASTRAY},
        cause="does not reach it over TCP (10.0.0.1 sent through eth0, not eth1): its kernel sends by another",
    ),
    Row(
        observed="rank 0 was reached and is gone",
        heard={"hosts": {HOST: "not reached: 10.0.0.1 Connection refused"}, "proved": {HOST: None}},
        cause="rank 0 was reached and has gone since",
    ),
    Row(
        observed="rank 0 was reached and is gone, and this machine has gone offline",
        heard={"hosts": {HOST: "connection lost"}, "proved": {HOST: None}},
        machine=OFFLINE,
        cause="this machine is offline: eth0 is down",
    ),
    Row(
        observed="rank 0 is not heard, and another version of the protocol is",
        rejected=VERSION,
        machine=NO_ROUTE,
        cause="an incompatible mingle",
    ),
    Row(
        observed="rank 0 is not heard, and a check of this machine fails",
        machine=SURE,
        heard={"other_jobs": TYPO},
        cause="Network is unreachable",
    ),
    Row(
        observed="rank 0 is not heard, and the same job is in another attempt of the launcher",
        heard={"other_attempts": {"2": "10.0.0.3"}},
        machine=NO_ROUTE,
        cause="the launcher's attempt differs: '2'",
    ),
    Row(
        observed="rank 0 is not heard, a similar job id is; there is no default route",
        heard={"other_jobs": TYPO},
        machine=NO_ROUTE,
        cause="a mistyped job id: 'resent' is on this network",
    ),
    Row(
        observed="rank 0 is not heard, other ranks of the job are, and so is another job",
        heard={"seekers": SEEKER, "other_jobs": OTHER},
        machine=NO_ROUTE,
        cause="rank 0 was not started, has ended already, or runs alone with a world size of 1",
    ),
    Row(
        observed="rank 0 is not heard, a job id that resembles ours not at all is",
        heard={"other_jobs": OTHER},
        machine=NO_ROUTE,
        cause="its multicast does not reach this network (other jobs are heard, so multicast works here)",
    ),
    Row(
        observed="rank 0 is not heard, other ranks of the job are",
        heard={"seekers": SEEKER},
        machine=NO_ROUTE,
        cause="rank 0 was not started, has ended already, or runs alone with a world size of 1",
    ),
    Row(
        observed="rank 0 is not heard, and another process has the same rank",
        heard={"seekers": SEEKER | TWIN},
        cause="rank 1 was started twice, here and on host node2 (10.0.0.2), pid 9, and rank 0 was not started",
    ),
    Row(
        observed="rank 0 is not heard, and two other processes with one rank look for it at the same time",
        heard={"seekers": TWINS, "heard_at": {b"A" * 16: (0.0, 9.0), b"B" * 16: (3.0, 9.0)}},
        cause="rank 2 was started twice, on host node2 (10.0.0.2), pid 9 and on host node3 (10.0.0.3), pid 5, and rank",
    ),
    Row(
        observed="the same, and one was not heard any more when the other one came",
        heard={"seekers": TWINS, "heard_at": {b"A" * 16: (0.0, 2.0), b"B" * 16: (3.0, 9.0)}},
        cause="rank 0 was not started",
    ),
    Row(
        observed="rank 0 is not heard, and only ranks of this machine are",
        heard={"seekers": SEEKER},
        network={"hostname": "node2"},
        cause="has ended already, or runs alone with a world size of 1, the network carries no multicast",
    ),
    Row(observed="no process is heard, and only loopback is up", machine=LOOPBACK, cause="only loopback is used"),
    Row(
        observed="other ranks of this machine are heard, and MINGLE_INTERFACE is lo",
        heard={"seekers": SEEKER},
        machine=LEFT_OVER,
        cause="rank 0 was not started, or is on another machine: MINGLE_INTERFACE names loopback alone",
    ),
    Row(
        observed="no process is heard, and the system has no free port to choose",
        machine=PORTLESS,
        cause="no port is free among those that the system chooses from (net.ipv4.ip_local_port_range is 40000 40003)",
    ),
    Row(
        observed="no process is heard, this host's firewall drops multicast, and its shared folder is empty",
        machine=EMPTY_FOLDER,
        cause="no other process of this job is seen in dir:/shared/mingle",
    ),
    Row(
        observed="no process is heard, and this one's UDP port is not the default",
        machine=OTHER_PORT,
        cause="has ended already, or runs alone with a world size of 1, or with another MINGLE_PORT than 31000",
    ),
    Row(
        observed="no process is heard, and this machine has only IPv6",
        network={"groups": ["ff12::b195:745f"]},
        cause="a world size of 1, or with only IPv4 (this machine has only IPv6), the network carries no multicast",
    ),
    Row(
        observed="other ranks of this machine are heard, and MINGLE_TTL is 0",
        heard={"seekers": SEEKER},
        machine=NO_TTL,
        cause="rank 0 was not started, or is on another machine: MINGLE_TTL is 0, so multicasts",
    ),
    Row(
        observed="no process is heard, and MINGLE_FAMILY is set",
        machine=ONE_FAMILY,
        cause="MINGLE_FAMILY is 6, so a process that uses only IPv4 is not heard",
    ),
    Row(
        observed="another job is heard, and MINGLE_FAMILY is set",
        machine=ONE_FAMILY,
        heard={"other_jobs": OTHER},
        cause="rank 0 was not started",
    ),
    Row(
        observed="no process is heard, and MINGLE_PEERS names this machine alone",
        machine=NAMES_ITSELF,
        cause="rank 0 was not started, or is on another machine: MINGLE_PEERS leads to this machine alone",
    ),
    Row(
        observed="other ranks of this machine are heard, and MINGLE_PEERS names this machine alone",
        machine=NAMES_ITSELF,
        heard={"seekers": SEEKER},
        cause="rank 0 was not started, or is on another machine: MINGLE_PEERS leads to this machine alone",
    ),
    Row(
        observed="the same, and a multicast of another machine was heard",
        machine=replace(NAMES_ITSELF, multicast_heard=True),
        heard={"seekers": SEEKER},
        cause="rank 0 was not started",
    ),
    Row(
        observed="no process is heard, and MINGLE_INTERFACE names one of two networks",
        machine=NAMED,
        cause="MINGLE_INTERFACE names eth0 alone",
    ),
    Row(
        observed="no process is heard, and there is no default route",
        machine=NO_ROUTE,
        cause="has ended already, or runs alone with a world size of 1, the network carries no multicast",
    ),
    Row(
        observed="rank 0 is not heard, other ranks of the job are, in a Kubernetes pod without MINGLE_PEERS",
        heard={"seekers": SEEKER},
        machine=POD,
        cause="this is a Kubernetes pod, and multicast rarely passes between nodes",
    ),
    Row(
        observed="no process is heard, a host of MINGLE_PEERS does not answer, and the UDP port is not the default",
        machine=OTHER_PORT,
        network={**WRONG_PEER, "asked_ports": [31000]},
        cause="no answer: no process was started there, or with another MINGLE_PORT than 31000",
    ),
    Row(
        observed="no process is heard, and a host of MINGLE_PEERS does not answer",
        network=WRONG_PEER,
        cause="nothing has come from node0 = 10.0.0.9: no answer",
    ),
    Row(
        observed="no process is heard",
        cause="has ended already, or runs alone with a world size of 1, the network carries no multicast",
    ),
)
AGENTS = (
    Row(
        observed="a node was refused",
        status=Status(joined=2, world_size=4, refused=("host x: world size",)),
        machine=SURE,
        cause="settings that contradict the others",
    ),
    Row(
        observed="nodes came while all places of the job were taken, and that run is gone",
        status=Status(joined=1, world_size=4, lacks="a place: all 4 places were taken when this node came"),
        heard={"seekers": A_NODE},
        machine=SURE,
        cause="nodes came while the job ran on others",
    ),
    Row(
        observed="a node said that it failed",
        assigned=True,
        heard={"failed": {b"A" * 16: Gone(None, "node2", f"host node2 (10.0.0.2), pid 9 {FAILED}")}},
        cause="host node2 (10.0.0.2), pid 9 has failed: the store can't listen",
    ),
    Row(
        observed="a node hears another one and can't connect to it",
        heard={"seekers": A_NODE, "unreached": APART},
        machine=NO_ROUTE,
        cause="host node1, pid 4 and host node2 (10.0.0.2), pid 9 hear each other and do not reach each other over TCP",
    ),
    Row(observed="a check of this machine fails", machine=SURE, heard={"other_jobs": TYPO}, cause="unreachable"),
    Row(
        observed="a process did not prove the secret",
        heard={"secret_failures": SECRET},
        machine=NO_ROUTE,
        cause="without a secret or with another one",
    ),
    Row(observed="another version is heard", rejected=VERSION, machine=NO_ROUTE, cause="an incompatible mingle"),
    Row(
        observed="a node was heard and has no seat",
        assigned=True,
        status=replace(PAIR, seated=b"BBBBCCCC"),
        heard={"seekers": {**A_NODE, b"B" * 16: "a node on host node1 (10.0.0.1), pid 5"}},
        cause="a node on host node2 (10.0.0.2), pid 9: heard but not joined",
    ),
    Row(
        observed="the same, and two machines were heard under its address",
        assigned=True,
        heard={"seekers": A_NODE, **TWO_NAMES},
        cause="heard but not joined. Host node2 and host node3 use the same address 10.0.0.2",
    ),
    Row(
        observed="a node came and went, and two machines were heard under its address",
        status=replace(PAIR, left=("host node2 (10.0.0.2), pid 9: reset",)),
        heard=TWO_NAMES,
        cause="host node2 and host node3 use the same address 10.0.0.2",
    ),
    Row(
        observed="more nodes were heard than have joined",
        assigned=True,
        heard={"seekers": A_NODE},
        machine=NO_ROUTE,
        cause="a node on host node2 (10.0.0.2), pid 9: heard but not joined",
    ),
    Row(
        observed="another job id is heard; there is no default route",
        heard={"other_jobs": TYPO},
        machine=NO_ROUTE,
        cause="a mistyped --rdzv-id: 'resent' is on this network",
    ),
    Row(
        observed="a job id that resembles ours not at all is heard",
        heard={"other_jobs": OTHER},
        machine=LOOPBACK,
        cause="the other nodes were not started",
    ),
    Row(
        observed="other nodes have joined, and there is no default route",
        status=PAIR,
        machine=NO_ROUTE,
        cause="the other nodes were not started",
    ),
    Row(
        observed="other nodes have joined, and only loopback is up",
        status=PAIR,
        machine=LOOPBACK,
        cause="the other nodes were not started",
    ),
    Row(
        observed="a node came and went, and only loopback is up",
        status=Status(joined=1, world_size=4, left=("host x: reset",)),
        machine=LOOPBACK,
        cause="the other nodes were not started",
    ),
    Row(
        observed="no process is heard, and there is no default route",
        machine=NO_ROUTE,
        cause="the other nodes were not started",
    ),
    Row(observed="no process is heard, and only loopback is up", machine=LOOPBACK, cause="only loopback is used"),
    Row(
        observed="no process of another machine is heard, and MINGLE_INTERFACE is lo",
        machine=LEFT_OVER,
        cause="the missing nodes were not started, or are on other machines: MINGLE_INTERFACE names loopback alone",
    ),
    Row(
        observed="no process is heard, this host's firewall drops multicast, and its shared folder is empty",
        machine=EMPTY_FOLDER,
        cause="no other process of this job is seen in dir:/shared/mingle",
    ),
    Row(
        observed="no process is heard, and this one's UDP port is not the default",
        machine=OTHER_PORT,
        cause="the other nodes were not started, or with another MINGLE_PORT than 31000",
    ),
    Row(
        observed="other nodes have joined, in a Kubernetes pod without MINGLE_PEERS",
        status=PAIR,
        machine=POD,
        cause="this is a Kubernetes pod, and multicast rarely passes between nodes",
    ),
    Row(
        observed="no process is heard, and a host of MINGLE_PEERS does not answer",
        network=WRONG_PEER,
        cause="nothing has come from node0 = 10.0.0.9: no answer",
    ),
    Row(observed="no process is heard", cause="the other nodes were not started, the network carries no multicast"),
)
FIND = (
    Row(
        observed="the host was heard and no connection to it stood",
        heard={"offer": "", "seeker": ""},
        machine=NO_ROUTE,
        cause="its host was heard but could not be reached over TCP",
    ),
    Row(
        observed="the host was reached and is gone",
        heard={"offer": "was alive"},
        machine=NO_ROUTE,
        cause="its host was reached and has gone since",
    ),
    Row(observed="another version is heard", rejected=VERSION, machine=NO_ROUTE, cause="an incompatible mingle"),
    Row(observed="a check of this machine fails", machine=SURE, heard={"seeker": ""}, cause="Network is unreachable"),
    Row(
        observed="ranks look for the job",
        heard={"seeker": "", "other": "resent"},
        machine=NO_ROUTE,
        cause="its rank 0 was not started or does not hear us",
    ),
    Row(
        observed="a similar job id is heard; there is no default route",
        heard={"other": "resent"},
        machine=NO_ROUTE,
        cause="a mistyped job id: 'resent' is on this network",
    ),
    Row(
        observed="a job id that resembles it not at all is heard",
        heard={"other": "bert"},
        machine=LOOPBACK,
        cause="the job does not run, or its multicast does not reach this network (other jobs are heard",
    ),
    Row(observed="no process is heard, and only loopback is up", machine=LOOPBACK, cause="only loopback is used"),
    Row(
        observed="no process is heard, and MINGLE_INTERFACE is lo",
        machine=LEFT_OVER,
        cause="the job was not started, or is on another machine: MINGLE_INTERFACE names loopback alone",
    ),
    Row(
        observed="no process is heard, and there is no default route",
        machine=NO_ROUTE,
        cause="the job does not run, or this network carries no multicast",
    ),
)
LIST = (
    Row(observed="a check of this machine fails", machine=SURE, rejected=VERSION, cause="Network is unreachable"),
    Row(observed="another version is heard", rejected=VERSION, machine=LOOPBACK, cause="an incompatible mingle"),
    Row(observed="no process is heard, and only loopback is up", machine=LOOPBACK, cause="only loopback is used"),
    Row(
        observed="no process is heard, and there is no default route",
        machine=NO_ROUTE,
        cause="no job runs here, or no multicast passes",
    ),
)
PING = (
    Row(observed="a check of this machine fails", machine=SURE, cause="Network is unreachable"),
    Row(
        observed="a host pings about another job",
        heard={"job": "bert"},
        machine=NO_ROUTE,
        cause="192.0.2.66 pings about 'bert', and not with us",
    ),
    Row(observed="another version is heard", rejected=VERSION, machine=LOOPBACK, cause="version 9 of the protocol"),
    Row(observed="no process is heard, and only loopback is up", machine=LOOPBACK, cause="only loopback is used"),
    Row(
        observed="no process is heard, and there is no default route",
        machine=NO_ROUTE,
        cause="the command does not run on another host, or no multicast passes",
    ),
)
LADDERS: Mapping[str, tuple[Callable[[Row], str], tuple[Row, ...]]] = {
    "a rank": (rank_names, RANKS),
    "a torchrun agent": (agent_names, AGENTS),
    "`mingle-discover find`": (find_names, FIND),
    "`mingle-discover list`": (list_names, LIST),
    "`mingle-discover ping`": (ping_names, PING),
}
