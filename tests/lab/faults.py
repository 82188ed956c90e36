"""The faults that people meet, each made for real, and what they are told then.

Each function makes one fault in a lab and returns what was said, by who said it: ``init`` is the error of
`mingle.init` (its words are those of `mingle.discover`, which it calls), the others are commands.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from unittest import mock

from . import UDP, Host, Lab, Rank
from .commands import HOLD_PORT, attempt, command, speak_another_version
from .scenarios import wait_for_log

SECONDS = 3.0
"""The discovery timeout of ranks that shall fail; the browse group is asked 2 s before its end."""
PATIENT_SECONDS = 8.0
"""The same of a further attempt."""
ATTEMPTS = 3

Said = dict[str, str]


def tried(lab: Lab, check: Callable[[Lab], None]) -> None:
    """Check what is said in a lab, and again in fresh ones if it is wrong: on a busy machine some ask too late."""
    for number in range(ATTEMPTS):
        seconds = PATIENT_SECONDS if number else SECONDS
        with Lab() if number else contextlib.nullcontext(lab) as fresh, mock.patch(f"{__name__}.SECONDS", seconds):
            try:
                check(fresh)
            except AssertionError as error:
                if number == ATTEMPTS - 1:
                    raise
                print(error)
                time.sleep(5.0 * (number + 1))  # until what has kept the machine busy is over
            else:
                return


def try_rank(
    host: Host,
    rank: int,
    world_size: int = 2,
    job: str = "resnet",
    env: Mapping[str, str] | None = None,
    **arguments: object,
) -> Rank[str]:
    arguments.setdefault("discovery_timeout", SECONDS)
    return host.start(attempt, job, rank, world_size, env=env, **arguments)


def start(host: Host, words: str, env: Mapping[str, str] | None = None) -> Rank[tuple[int, str]]:
    return host.start(command, *words.split(), env=env)


def said(process: Rank[tuple[int, str]]) -> str:
    return process.result()[1]


def run(host: Host, words: str, env: Mapping[str, str] | None = None) -> str:
    return said(start(host, words, env))


def ping_words() -> str:
    return f"ping resnet --count 8 --interval {SECONDS / 20:g}"


def pings(*hosts: Host, options: Mapping[int, str] | None = None) -> list[str]:
    """What ping says on each host, all at the same time."""
    running = [start(host, f"{ping_words()} {(options or {}).get(index, '')}") for index, host in enumerate(hosts)]
    return [said(each) for each in running]


def name_server_silent(lab: Lab) -> Said:
    network = lab.network()
    server, host = (lab.host(network) for _ in range(2))
    server.drop("udp dport 53")
    host.resolver_file.write_text(f"nameserver {server.address()}\n")
    return {"doctor": run(host, "doctor")}


def set_sysctl(host: Host, name: str, value: int) -> None:
    host.namespace.tool(["sh", "-c", f"echo {value} > /proc/sys/{name}"])


def two(lab: Lab, *, link_local: bool = False) -> tuple[Host, Host]:
    lan = lab.network(link_local=link_local)
    return lab.host(lan), lab.host(lan)


def no_multicast(lab: Lab) -> None:
    """A network, such as a cloud's, that carries none."""
    lab.networks[0].namespace.nft(
        "table bridge cloud { chain c { type filter hook forward priority 0; ip daddr 224.0.0.0/4 drop; }; }"
    )


# --- the job --------------------------------------------------------------------------------------------------


def mistyped_job_id(lab: Lab) -> Said:
    one, other = two(lab)
    right, wrong = try_rank(one, 0), try_rank(other, 1, job="resent")
    wrong.wait_for("started")
    listed = run(other, "list")
    right.result()
    return {"init": wrong.result(), "list": listed}


def missing_rank(lab: Lab) -> Said:
    one, other = two(lab)
    ranks = [try_rank(one, 0, 3), try_rank(other, 1, 3)]
    ranks[1].wait_for("started")
    listed = run(other, "list")
    return {"init": ranks[0].result(), "list": listed}


def rank_twice(lab: Lab) -> Said:
    one, other = two(lab)
    ranks = [try_rank(one, 0, 3), try_rank(one, 1, 3)]
    listed = run(one, f"list --timeout {SECONDS / 3:g}")
    second = try_rank(other, 1, 3).result()
    for rank in ranks:
        rank.result()
    return {"init": second, "list": listed}


def two_rank_zeros(lab: Lab) -> Said:
    one, other = two(lab)
    listing = start(one, f"list --timeout {SECONDS / 2:g}")
    ranks = [try_rank(one, 0), try_rank(other, 0)]
    ranks[1].result()
    return {"init": ranks[0].result(), "list": said(listing)}


def world_sizes(lab: Lab) -> Said:
    one, other = two(lab)
    ranks = [try_rank(one, 0, 3), try_rank(other, 1, 2)]
    listed = run(one, f"list --timeout {SECONDS / 3:g}")
    ranks[0].result()
    return {"init": ranks[1].result(), "list": listed}


def master_addr(lab: Lab) -> Said:
    one, other = two(lab)
    env = {"MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "29500"}
    ranks = [try_rank(one, 0, env=env), try_rank(other, 1)]
    formed = [rank.result() for rank in ranks]
    return {"init": formed[0], "doctor": run(one, "doctor", env)}


def sbatch_body(lab: Lab) -> Said:
    one, _ = two(lab)
    env = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    rank = one.start(attempt_by_environment, env=env)
    return {"init": rank.result(), "doctor": run(one, "doctor", env), "env": run(one, "env", env)}


def attempt_by_environment() -> str:
    return attempt("resnet", None, None)  # type: ignore[arg-type]


def another_version(lab: Lab) -> Said:
    one, other = two(lab)
    foreign = one.start(speak_another_version, "resnet")
    rank = try_rank(other, 1)
    env = {"MINGLE_JOB_ID": "resnet"}
    told = {"doctor": run(other, "doctor", env), "ping": run(other, ping_words()), "init": rank.result()}
    foreign.kill()
    return told


# --- the secret -----------------------------------------------------------------------------------------------


def _secrets(lab: Lab, theirs: str | None) -> Said:
    one, other = two(lab)
    ranks = [try_rank(one, 0, secret="s3cret"), try_rank(other, 1, secret=theirs)]
    env = {"MINGLE_SECRET": "s3cret"}
    pinging = start(one, ping_words(), env)
    there = start(other, ping_words(), {} if theirs is None else {"MINGLE_SECRET": theirs})
    ranks[0].result()
    said(there)
    return {"init": ranks[1].result(), "ping": said(pinging)}


def secrets_differ(lab: Lab) -> Said:
    return _secrets(lab, "another")


def secret_on_one_side(lab: Lab) -> Said:
    return _secrets(lab, None)


# --- interfaces and routes ------------------------------------------------------------------------------------


def _interface(lab: Lab, name: str, *commands: str) -> Said:
    one, _ = two(lab)
    if commands:
        one.ip(*commands)
    env = {"MINGLE_INTERFACE": name}
    return {"init": try_rank(one, 0, env=env).result(), "doctor": run(one, "doctor", env)}


def interface_missing(lab: Lab) -> Said:
    return _interface(lab, "eth7")


def interface_down(lab: Lab) -> Said:
    return _interface(lab, "eth0", "link set eth0 down")


def interface_without_address(lab: Lab) -> Said:
    return _interface(lab, "eth0", "address flush dev eth0")


def no_default_route(lab: Lab) -> Said:
    one, _ = two(lab)
    one.ip("route del default")
    rank = try_rank(one, 1, peers="10.50.0.9")
    return {"init": rank.result(), "doctor": run(one, "doctor")}


def only_loopback(lab: Lab) -> Said:
    alone = lab.host()
    rank = try_rank(alone, 1)
    return {"doctor": run(alone, "doctor"), "init": rank.result()}


def network_not_shared(lab: Lab) -> Said:
    mine, shared, theirs = (lab.network(f"10.{net}.0.0/24", link_local=False) for net in (77, 88, 99))
    one, other = lab.host(mine, shared), lab.host(theirs, shared)
    env = {"MINGLE_INTERFACE": "eth0"}
    rank = try_rank(one, 0, env=env)
    serving = start(other, "doctor --serve --timeout 4")
    told = run(one, f"doctor --check {other.address(shared)}", env)
    said(serving)
    return {"init": rank.result(), "doctor": told}


def reverse_path_filter(lab: Lab) -> Said:
    one, other = two(lab)
    other.ip("address flush dev eth0", "address add 10.99.0.2/24 dev eth0", "route add default dev eth0")
    one.ip("route del default")
    set_sysctl(one, "net/ipv4/conf/eth0/rp_filter", 1)
    ranks = [try_rank(one, 0), try_rank(other, 1)]
    pinging = start(other, ping_words() + " --count 14")
    told = run(one, "doctor")
    said(pinging)
    ranks[1].result()
    return {"init": ranks[0].result(), "doctor": told}


def own_name_is_loopback(lab: Lab) -> Said:
    one, other = two(lab)
    one.hosts_file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {one.name}\n")
    ranks = [try_rank(one, 0), try_rank(other, 1)]
    ranks[1].result()
    return {"init": ranks[0].result(), "doctor": run(one, "doctor")}


def membership_limit(lab: Lab) -> Said:
    one, _ = two(lab)
    set_sysctl(one, "net/ipv4/igmp_max_memberships", 1)
    return {"init": try_rank(one, 1).result(), "doctor": run(one, "doctor")}


def peer_without_address(lab: Lab) -> Said:
    one, _ = two(lab)
    env = {"MINGLE_PEERS": "node-17"}
    rank = try_rank(one, 1, env=env)
    return {"doctor": run(one, "doctor", env), "init": rank.result()}


# --- firewalls and switches -----------------------------------------------------------------------------------


def own_firewall(lab: Lab) -> Said:
    one, other = two(lab)
    other.drop(f"ct state new {UDP}")
    ranks = [try_rank(one, 0), try_rank(other, 1)]
    told = run(other, "doctor")
    pinged = pings(one, other)[1]
    ranks[0].result()
    return {"init": ranks[1].result(), "doctor": told, "ping": pinged}


def other_firewall(lab: Lab) -> Said:
    one, other = two(lab)
    other.drop(f'iifname != "lo" {UDP}')
    ranks = [try_rank(one, 0), try_rank(other, 1)]
    serving = start(other, "doctor --serve --timeout 4")
    told = run(one, f"doctor --check {other.address()}")
    said(serving)
    ranks[1].result()
    return {"init": ranks[0].result(), "doctor --check": told, "ping": pings(one, other)[0]}


def rank_zero_tcp(lab: Lab) -> Said:
    one, other = two(lab)
    one.drop("meta l4proto tcp")
    ranks = [try_rank(one, 0), try_rank(other, 1)]
    told = run(one, "doctor")
    pinged = pings(one, other)[1]
    ranks[0].result()
    return {"init": ranks[1].result(), "doctor": told, "ping": pinged}


def workers_tcp(lab: Lab) -> Said:
    lan = lab.network(link_local=False)
    hosts = [lab.host(lan) for _ in range(3)]
    hosts[2].drop(f"ip saddr {hosts[1].address()} meta l4proto tcp")
    ranks = [try_rank(host, rank, 3) for rank, host in enumerate(hosts)]
    formed = [rank.result() for rank in ranks]
    return {"init": formed[1], "ping": pings(*hosts)[1]}


def port_taken(lab: Lab) -> Said:
    one, _ = two(lab)
    holder = one.run([sys.executable, HOLD_PORT])
    holder.wait_for_output("holding")
    told = {"init": try_rank(one, 1).result(), "doctor": run(one, "doctor")}
    holder.kill()
    return told


def port_shared(lab: Lab) -> Said:
    one, other = two(lab)
    no_multicast(lab)
    first = try_rank(one, 0)
    wait_for_log(first, "job resnet")  # its sockets are open: the other program is the last that opens the port
    holder = one.run([sys.executable, HOLD_PORT, "shared"])
    holder.wait_for_output("holding")
    second = try_rank(other, 1, peers=one.address())
    second.result()
    first_said = first.result()
    # Not before: the doctor is the last that opens the port, and hands to the rank what is meant for it.
    told = run(one, "doctor")
    holder.kill()
    return {"init": first_said, "doctor": told}


def flooding_off(lab: Lab) -> Said:
    lan = lab.network(link_local=False)
    # A bridge that snoops and knows a querier sends a group to its members alone; here it learns of none.
    lan.namespace.ip("link set lan type bridge mcast_snooping 1 mcast_query_response_interval 10")
    lan.namespace.nft(
        "table bridge deaf { chain c { type filter hook prerouting priority 0; ip protocol igmp drop; }; }"
    )
    one, other = lab.host(lan), lab.host(lan)
    lan.namespace.ip("link set lan type bridge mcast_querier 1")
    # It filters once the response interval of 0.1 s is over (net/bridge/br_multicast.c); no event tells of that.
    threading.Event().wait(0.5)
    ranks = [try_rank(one, 0), try_rank(other, 1)]
    ranks[0].result()
    init = ranks[1].result()
    serving = start(other, "doctor --serve --timeout 4")
    told = run(one, f"doctor --check {other.address()}")
    said(serving)
    pinged = pings(one, other, options={0: f"--peers {other.address()}", 1: f"--peers {one.address()}"})[0]
    return {"init": init, "doctor --check": told, "ping": pinged}
