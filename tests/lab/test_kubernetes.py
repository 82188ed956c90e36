"""The Kubernetes example on hosts that stand for its pods: what the manifest gives them is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

import mingle
from mingle.config.launchers import INDEXED_JOB

from . import Lab
from .name_server import serve_name
from .scenarios import check, describe, results, sum_of_ranks

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "digits.yaml"
UID = "f3a1c0de-0000-4000-8000-000000000001"


def training_script() -> dict[str, Any]:
    """What a script does that knows nothing of Kubernetes."""
    with mingle.init(backend="gloo") as job:
        assert job.job_id == UID
        result = describe(job)
        result["sum"] = sum_of_ranks()
        # Nobody may leave while another still asks rank 0 for the roster.
        dist.barrier()
        return result


def test_the_pods_of_the_example_find_rank_0_by_its_name(lab: Lab) -> None:
    """Its network carries no multicast, and rank 0's name exists some time after the first pods have started."""
    service, _, job = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry.get("value", UID) for entry in container["env"]}
    network = lab.network()
    pods = [lab.host(network, name=f"{job['metadata']['name']}-{index}") for index in range(job["spec"]["completions"])]
    server = lab.host(network, name="dns")
    domain = "default.svc.cluster.local"
    name = f"{pods[0].name}.{service['metadata']['name']}.{domain}"
    server.start(serve_name, name, [(2.0, [pods[0].address()])], server.address()).wait_for("listening")
    for host in pods:
        host.drop_multicast()
        host.resolver_file.write_text(f"nameserver {server.address()}\nsearch {domain}\noptions ndots:5\n")
    # What Kubernetes adds by itself to the pods of an Indexed Job is the variable of the table's row.
    (index_variable,) = INDEXED_JOB.rank
    ranks = [
        host.start(training_script, env={**given, index_variable: str(index), "MINGLE_TIMEOUT": "30"})
        for index, host in enumerate(pods)
    ]
    found = results(ranks)
    check(found, pods, pods[0])
    assert max(result["elapsed"] for result in found) > 1.5, "it could not be complete before there was a name"
