"""Kubernetes on hosts that stand for its pods: a subnet for each node, routed, and a name server with a cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

import mingle
from mingle.config.launchers import INDEXED_JOB
from tests.support.levels import chosen

from . import Host, Lab
from .name_server import serve_name
from .scenarios import describe, formed, ranks_are, report_log, start_ranks, sum_of_ranks, wait_for_log

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "digits.yaml"
UID = "f3a1c0de-0000-4000-8000-000000000001"
DOMAIN = "default.svc.cluster.local"
CACHED_SECONDS = 5.0
"""How long a cluster's name server (CoreDNS) repeats an answer, also that a name does not exist."""
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
"""What every pod has."""


def pods_of(lab: Lab, names: Sequence[str], *, nodes: int) -> list[Host]:
    """Pods in turn on so many nodes, each a subnet of its own; a router between them forwards no multicast."""
    networks = [lab.network(f"10.244.{node}.0/24") for node in range(nodes)]
    router = lab.host(*networks, name="router")
    router.namespace.tool(["sysctl", "-qw", "net.ipv4.ip_forward=1"])
    pods = []
    for number, name in enumerate(names):
        network = networks[number % nodes]
        pods.append(lab.host(network, name=name))
        pods[-1].ip(f"route replace default via {router.address(network)}")
    return pods


def training_script() -> dict[str, Any]:
    """What a script does that knows nothing of Kubernetes."""
    report_log()
    with mingle.init(backend="gloo") as job:
        assert job.job_id == UID
        result = describe(job)
        result["sum"] = sum_of_ranks()
        # Nobody may leave while another still asks rank 0 for the roster.
        dist.barrier()
        return result


def test_the_pods_of_the_example_find_rank_0_by_its_name(lab: Lab) -> None:
    """Rank 0's name comes to exist after the first pods have asked, and the cache denies it for a while."""
    service, _, job = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry.get("value", UID) for entry in container["env"]}
    names = [f"{job['metadata']['name']}-{index}" for index in range(job["spec"]["completions"])]
    *pods, server = pods_of(lab, [*names, "dns"], nodes=2)
    name = f"{pods[0].name}.{service['metadata']['name']}.{DOMAIN}"
    named = server.start(serve_name, name, [(2.0, [pods[0].address()])], server.address(), cached=CACHED_SECONDS)
    named.wait_for("listening")
    for host in pods:
        search = f"{DOMAIN} svc.cluster.local cluster.local"
        host.resolver_file.write_text(f"nameserver {server.address()}\nsearch {search}\noptions ndots:5\n")
    # What Kubernetes adds by itself to the pods of an Indexed Job is the variable of the table's row.
    (index_variable,) = INDEXED_JOB.rank
    ranks = [
        host.start(training_script, env={**given, **IN_A_POD, index_variable: str(index), "MINGLE_TIMEOUT": "40"})
        for index, host in enumerate(pods)
    ]
    assert formed(ranks, pods) > 4.5, "it could not be complete before there was a name"


@pytest.mark.soak(3)
@pytest.mark.parametrize("given", chosen([True], soak=[False]), ids=ranks_are)
def test_pods_of_several_nodes_that_name_no_peers_say_what_to_set(lab: Lab, given: bool) -> None:
    """Multicast passes between pods of one node, which proves nothing: two of each node hear each other."""
    pods = pods_of(lab, ["digits-0", "digits-1", "digits-2", "digits-3"], nodes=2)
    ranks = start_ranks(pods, "pods", given=given, env=IN_A_POD, discovery_timeout=18.0)
    fix = "set MINGLE_PEERS to a headless Service of the job's pods, or to dir:/PATH on a volume they share"
    for rank in ranks:
        wait_for_log(rank, fix)
    errors = [str(rank.error(40.0)) for rank in ranks]
    assert not [error for error in errors if "multicast works here" in error]
    for node in (errors[::2], errors[1::2]):
        assert any(fix in error for error in node)
