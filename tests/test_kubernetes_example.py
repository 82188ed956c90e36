"""examples/kubernetes: the manifest is one that Kubernetes takes, and its parts fit together. No cluster is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mingle.config.launchers import INDEXED_JOB
from mingle.config.settings import VARIABLES, resolve

MANIFEST = Path(__file__).parents[1] / "examples" / "kubernetes" / "digits.yaml"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """The objects of the manifest by kind."""
    documents = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    return {document["kind"]: document for document in documents}


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("kind", ["Service", "Job"])
def test_it_has_the_form_that_kubernetes_takes(objects: dict[str, Any], kind: str, version: str) -> None:
    kubernetes_validate.validate(objects[kind], version, strict=True)


def test_a_misspelt_field_would_be_found(objects: dict[str, Any]) -> None:
    spec = {**objects["Job"]["spec"], "completionmode": "Indexed"}
    with pytest.raises(kubernetes_validate.ValidationError, match="completionmode"):
        kubernetes_validate.validate({**objects["Job"], "spec": spec}, "1.28", strict=True)


def test_the_service_leads_to_the_pods_of_the_job(objects: dict[str, Any]) -> None:
    service, job = objects["Service"], objects["Job"]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


def test_each_pod_learns_its_place_and_where_rank_0_is(objects: dict[str, Any]) -> None:
    spec = objects["Job"]["spec"]
    assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
    (container,) = spec["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value", "a uid") for entry in container["env"]}
    assert {name for name in given if name.startswith("MINGLE_")} <= set(VARIABLES)
    for index in range(spec["completions"]):
        settings = resolve({**given, "JOB_COMPLETION_INDEX": str(index)})
        assert (settings.launcher, settings.rank) == (INDEXED_JOB.name, index)
        assert settings.world_size == spec["completions"]
        assert settings.job_id == "a uid"
        # A pod of an Indexed Job is named after the Job and its index.
        names = [objects["Job"]["metadata"]["name"], objects["Service"]["metadata"]["name"]]
        assert [str(peer) for peer in settings.peers] == [f"{names[0]}-0.{names[1]}"]


def test_the_script_is_the_one_of_the_image(objects: dict[str, Any]) -> None:
    (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "ddp_train.py"]
    assert "ddp_train.py" in (MANIFEST.parents[2] / "Dockerfile").read_text(encoding="utf-8")
