"""What mingle-discover says in containers, where nothing is wrong."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from .output import MET
from .project import Container, MakeProject
from .training import FOREVER


def discover(container: Container, words: str) -> dict[str, list[dict[str, str]]]:
    answer: dict[str, list[dict[str, str]]] = json.loads(
        container.run("sh", "-c", f"mingle-discover {words} --json || test $? = 1")
    )
    return answer


def test_nothing_is_wrong_in_a_container(project: MakeProject) -> None:
    two = project(FOREVER, WORLD_SIZE="2")
    containers = two.up()
    for container in containers:
        container.wait_for(MET)
    with ThreadPoolExecutor() as pool:
        pings = list(pool.map(lambda each: discover(each, "ping --count 8 --interval 0.3"), containers))
    for container, told in zip(containers, pings, strict=True):
        assert {each["status"] for each in told["findings"]} == {"PASS"}, told
        assert {peer["hostname"] for peer in told["peers"]} == {each.hostname for each in containers} - {
            container.hostname
        }
    checks = discover(containers[0], "doctor")["checks"]
    assert {each["status"] for each in checks} == {"PASS"}, checks
