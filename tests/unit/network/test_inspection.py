"""What is read of this machine; no packet is sent for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mingle.diagnostics.diagnosis import Facts
from mingle.errors import InterfaceError, MingleError
from mingle.network import inspection
from mingle.network.interfaces import choose, scan
from tests.lab.lab import why_unavailable
from tests.support.failing import raising

LO = choose(scan(), named=["lo"]).usable


def facts(environ: dict[str, str] | None = None) -> Facts:
    return inspection.collect_facts(29499, used=LO, found=scan(), environ=environ)


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts({})
    assert found.used_names == ["lo"]
    assert found.only_loopback
    assert found.hostname == socket.gethostname()
    assert (found.environment_problems, found.master) == ([], "")
    assert "127.0.0.0/8" in found.networks
    if sys.platform == "linux":
        assert found.memberships
        assert "lo" in found.rp_filter
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: pytest.fail("looked up"))
    assert facts().hostname_addresses == [], "without an environment no name is looked up"


def test_the_environment() -> None:
    found = facts({"RANK": "3", "MASTER_ADDR": "1.2.3.4", "MASTER_PORT": "7"})
    assert found.master == "MASTER_ADDR=1.2.3.4 MASTER_PORT=7"
    ((observation, remedy),) = found.environment_problems
    assert "RANK='3'" in observation
    assert "WORLD_SIZE" in remedy
    assert facts({"RANK": "0", "WORLD_SIZE": "1"}).environment_problems == []


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("nameserver 10.0.0.5\n", 10.0),
        ("nameserver 10.0.0.5\noptions ndots:5 timeout:2 attempts:1\n", 2.0),
        ("nameserver 10.0.0.5\nnameserver 10.0.0.6\n", 20.0),
    ],
)
def test_name_servers_and_how_long_they_take(written: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one server it was seen in the lab, of two it is glibc's rule: the second one gets 2^1 * 5 s / 2."""
    monkeypatch.setattr(inspection, "read_text", lambda _file: written)
    servers, waited = inspection.name_servers()
    assert servers == [line.split()[1] for line in written.splitlines() if line.startswith("nameserver")]
    assert waited == seconds


@pytest.mark.parametrize(("ends", "silent"), [(True, False), (False, True)])
def test_look_up_that_does_not_end_in_time_is_silent(ends: bool, silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(inspection, "NAME_SECONDS", 60.0 if ends else 0.05)
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: None if ends else ended.wait(60))
    look_up = inspection.LookUp("192.0.2.1")
    try:
        assert look_up.is_silent(wait=True) is silent
    finally:
        ended.set()


HOSTS = "7 1 8:1 /docker/containers/9f/hosts /etc/hosts rw - ext4 /dev/a rw\n"
EC2, AZURE = {"sys_vendor": "Amazon EC2\n"}, {"sys_vendor": "Microsoft Corporation\n"}


@pytest.mark.parametrize(
    ("shown", "kubernetes", "where"),
    [
        ({}, None, ""),
        (EC2, None, "Amazon EC2"),
        (AZURE | {"chassis_asset_tag": f"{inspection._AZURE}\n"}, None, "Azure"),
        (AZURE, None, ""),
        ({"sys_vendor": "Google\n", "product_name": "Google Compute Engine\n"}, None, "Google Compute Engine"),
        ({"cloud-id": "gce\n"}, None, "gce"),
        ({"cloud-id": "nocloud\n"}, None, ""),
        (EC2, "10.96.0.1", "pod"),
        ({"self/mountinfo": HOSTS.replace("docker/containers", "var/lib/kubelet/pods")}, None, "pod"),
        ({"self/mountinfo": HOSTS, "net/eth0/ifindex": "7\n", "net/eth0/iflink": "8\n"}, None, "container"),
        pytest.param(
            {"self/mountinfo": HOSTS, "net/eth0/ifindex": "2\n", "net/eth0/iflink": "2\n"}
            | {"net/veth9/ifindex": "8\n", "net/veth9/iflink": "7\n"},
            None,
            "",
            id="in the network of its host",
        ),
        ({"self/mountinfo": f"{HOSTS}8 7 8:1 /tmp/hosts /etc/hosts rw - ext4 /dev/a rw\n"}, None, ""),
    ],
)
def test_where_this_machine_runs(
    shown: dict[str, str], kubernetes: str | None, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if kubernetes is not None:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", kubernetes)
    for name, text in {"net/lo/ifindex": "1\n", "net/lo/iflink": "1\n", **shown}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    places = {"_PROC": tmp_path, "_NET": tmp_path / "net", "_DMI": tmp_path, "_CLOUD_ID": tmp_path / "cloud-id"}
    for attribute, path in places.items():
        monkeypatch.setattr(inspection, attribute, path)
    assert inspection.surroundings() == where


def test_an_interface_problem_keeps_its_cause() -> None:
    problem = InterfaceError.explain("no eth7", cause="it is eth0 here", remedy="name eth0")
    found = inspection.collect_facts(1, interface_problem=problem)
    assert found.interface_problem == ("no eth7; likely cause: it is eth0 here", "name eth0")


def test_resolving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "NAME_SECONDS", 60.0)
    assert inspection.resolve("127.0.0.1") == (["127.0.0.1"], "")
    assert inspection.resolve("fe80::1%lo") == (["fe80::1%1"], "")
    addresses, why = inspection.resolve("a..b")
    assert addresses == []
    assert why


def test_a_resolver_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(inspection, "NAME_SECONDS", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: never.wait(30) and [])
    assert "no answer within" in inspection.resolve("slow")[1]
    never.set()


def test_a_comment_of_a_rule_can_hold_any_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing = b"table inet filter {\nchain input {\ntype filter hook input priority 0; policy drop;\n"
    (tmp_path / "listing").write_bytes(listing + b'udp dport 53 accept comment "caf\xe9"\n}\n}\n')
    tool = tmp_path / "nft"
    tool.write_text(f"#!/bin/sh\ncat '{tmp_path}/listing'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(inspection, "TOOL_SECONDS", 60.0)
    (chain,) = inspection.firewall_chains()
    assert (chain.hook, chain.policy, len(chain.rules)) == ("input", "drop", 1)


def test_a_limit_of_threads_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    with pytest.raises(MingleError, match="can't start new thread"):
        inspection.resolve("localhost")


@pytest.mark.skipif(why_unavailable() is not None, reason="needs root and network namespaces")
def test_routes_and_rules_of_a_namespace_of_its_own() -> None:
    """In a fresh network namespace, where everything is known."""
    program = (
        "from mingle.network import inspection as i; from mingle.network.interfaces import scan\n"
        "import subprocess as s\n"
        "i.TOOL_SECONDS = 60.0\n"
        "run = lambda text: s.run(text, shell=True, check=True)\n"
        "assert i.default_route() is None or i.default_route() is False, i.default_route()\n"
        "run('ip link set lo up; ip link add near type veth peer name far; ip link set near up; ip link set far up')\n"
        "run('ip address add 10.9.9.1/24 dev near')\n"
        "assert i.default_route() is False, i.default_route()\n"
        "run('ip route add 0.0.0.0/1 dev near')\n"
        "assert i.default_route() is False, 'half of all addresses, as a VPN routes them'\n"
        "run('ip route add default dev near')\n"
        "assert i.default_route() is True\n"
        "assert i.reverse_path_drops() == 0\n"
        "run('ip address add 10.9.8.1/24 dev far; ip link add docker0 type bridge; ip link set docker0 up')\n"
        "run('ip address add 172.17.0.1/16 dev docker0')\n"
        "run('echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter; echo 0 > /proc/sys/net/ipv4/conf/near/rp_filter')\n"
        "facts = i.collect_facts(29499, used=[each for each in scan() if each.name == 'near'], found=scan())\n"
        "assert facts.rp_filter == {'near': 1}, facts.rp_filter\n"
        "assert [each.split()[0] for each in facts.unused] == ['far'], facts.unused\n"
        "assert i.firewall_chains() == []\n"
        "run('nft add table inet x; nft \"add chain inet x y { type filter hook input priority 0; }\"')\n"
        "assert [each.hook for each in i.firewall_chains()] == ['input']\n"
        "assert i.membership_limit() == 20\n"
        "run('mount -t tmpfs none /run')\n"
        "assert i.firewall_manager() == 'nft'\n"
        "run('touch /run/firewalld.pid')\n"
        "assert i.firewall_manager() == 'firewalld'\n"
        "def found(*peers): return i.blocked_connection('near', ('10.9.9.1', 4000), [(each, 4001) for each in peers])\n"
        "assert found('10.9.9.2', '10.9.9.3') is None\n"
        "run('nft \"add rule inet x y tcp dport 4000 numgen random mod 2 < 1 drop\"')\n"
        "assert found('10.9.9.2') is None, 'a rule that drops some packets is not certain to have dropped this one'\n"
        "run('nft flush chain inet x y')\n"
        "run('nft add rule inet x y ip saddr 10.9.9.3 tcp dport 4000 counter drop comment nobodys_business')\n"
        "told = found('10.9.9.2', '10.9.9.3')\n"
        "assert (told.address, told.outgoing, told.chain) == ('10.9.9.3', False, 'inet x y'), told\n"
        "assert told.rule == 'ip saddr 10.9.9.3 tcp dport 4000 drop', told\n"
        "run('nft \"add chain inet x z { type filter hook output priority 0; policy drop; }\"')\n"
        "told = found('10.9.9.2')\n"
        "assert (told.address, told.outgoing, told.chain, told.rule) == ('10.9.9.2', True, 'inet x z', ''), told\n"
    )
    subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-c", program],
        check=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
