"""examples/kubernetes: Kubernetes accepts the manifests, and their parts fit together. No cluster is asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mingle.config import launchers
from mingle.config.settings import VARIABLES, Arguments, resolve

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))
WITH_SERVICE = [name for name in MANIFESTS if name != "volume.yaml"]
KINDS = ("Service", "NetworkPolicy", "Job")


def objects(name: str) -> dict[str, Any]:
    """Return the objects of a manifest by kind."""
    documents = list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))
    found = tuple(document["kind"] for document in documents)
    assert found == (KINDS if name in WITH_SERVICE else ("PersistentVolumeClaim", *KINDS[1:]))
    return {document["kind"]: document for document in documents}


def container_of(job: Any) -> Any:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("position", range(len(KINDS)))
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_has_the_form_that_kubernetes_takes(name: str, position: int, version: str) -> None:
    kubernetes_validate.validate([*objects(name).values()][position], version, strict=True)


def test_a_misspelt_field_would_be_found() -> None:
    job = objects("digits.yaml")["Job"]
    spec = {**job["spec"], "completionmode": "Indexed"}
    with pytest.raises(kubernetes_validate.ValidationError, match="completionmode"):
        kubernetes_validate.validate({**job, "spec": spec}, "1.28", strict=True)


@pytest.mark.parametrize("name", WITH_SERVICE)
def test_service_and_policy_are_those_of_the_pods(name: str) -> None:
    found = objects(name)
    service, policy, job = (found[kind] for kind in KINDS)
    pods = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"] == pods
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert policy["spec"]["podSelector"] == {"matchLabels": pods}
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": pods}}]}]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_has_resources_and_shared_memory(name: str) -> None:
    job = objects(name)["Job"]
    container = container_of(job)
    assert container["image"].startswith("REGISTRY/")
    assert {"requests", "limits"} == set(container["resources"])
    mount, *_ = container["volumeMounts"]
    volume, *_ = job["spec"]["template"]["spec"]["volumes"]
    assert (mount["mountPath"], volume["emptyDir"]["medium"]) == ("/dev/shm", "Memory")
    assert mount["name"] == volume["name"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pods_fit_on_one_node_of_two_cores_and_four_gigabytes(name: str) -> None:
    """A pod that no node has room for stays Pending, and all others wait for it."""
    job = objects(name)["Job"]
    requests = container_of(job)["resources"]["requests"]
    pods = job["spec"]["parallelism"]
    assert requests["cpu"].endswith("m")
    assert requests["memory"].endswith("Mi")
    # Kubernetes' own pods need the rest.
    assert pods * int(requests["cpu"].removesuffix("m")) <= 1000
    assert pods * int(requests["memory"].removesuffix("Mi")) <= 3072


def test_each_pod_learns_its_place_and_where_rank_0_is() -> None:
    found = objects("digits.yaml")
    spec = found["Job"]["spec"]
    assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
    given = {entry["name"]: entry.get("value", "a uid") for entry in container_of(found["Job"])["env"]}
    assert {name for name in given if name.startswith("MINGLE_")} <= set(VARIABLES)
    for index in range(spec["completions"]):
        environ = {**given, "JOB_COMPLETION_INDEX": str(index)}
        assert launchers.seen(environ) is launchers.INDEXED_JOB
        settings = resolve(environ, Arguments())
        assert settings.placement.rank == index
        assert settings.placement.world_size == spec["completions"]
        assert settings.job_id == "a uid"
        # A pod of an Indexed Job is named after the Job and its index.
        names = [found["Job"]["metadata"]["name"], found["Service"]["metadata"]["name"]]
        assert [str(peer) for peer in settings.peers] == [f"{names[0]}-0.{names[1]}"]


def test_with_a_volume_the_pods_need_no_service() -> None:
    claim, _, job = objects("volume.yaml").values()
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    spec = job["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(job)["volumeMounts"]}
    given = {entry["name"]: entry.get("value", "a uid") for entry in container_of(job)["env"]}
    settings = resolve({**given, "JOB_COMPLETION_INDEX": "1"}, Arguments())
    assert settings.folders == (f"dir:{mounts['shared']}",)
    assert (settings.placement.rank, settings.peers) == (1, ())


def test_each_agent_asks_all_pods() -> None:
    """Which of them will hold the store is not known, so the peers are the Service's name."""
    found = objects("torchrun.yaml")
    container, spec = container_of(found["Job"]), found["Job"]["spec"]
    given = {entry["name"]: entry.get("value", "a uid") for entry in container["env"]}
    assert given["MINGLE_PEERS"] == found["Service"]["metadata"]["name"]
    options = dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(container["args"])))
    assert options["rdzv-backend"] == "mingle"
    assert options["rdzv-id"] == "$(MINGLE_JOB_ID)"
    assert int(options["nnodes"]) == spec["completions"] == spec["parallelism"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_script_is_the_one_of_the_image(name: str) -> None:
    container = container_of(objects(name)["Job"])
    assert [*container["command"], *container.get("args", [])][-1] == "ddp_train.py"
    assert "ddp_train.py" in (FOLDER.parents[1] / "Dockerfile").read_text(encoding="utf-8")
