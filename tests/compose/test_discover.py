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
    for count in (8, 24, 72):  # on a busy machine few answers are in time
        words = f"ping --count {count} --interval 0.3"
        with ThreadPoolExecutor() as pool:
            pings = list(pool.map(discover, containers, [words] * len(containers)))
        if all(each["status"] == "PASS" for told in pings for each in told["findings"]):
            break
    for container, told in zip(containers, pings, strict=True):
        assert {each["status"] for each in told["findings"]} == {"PASS"}, told
        assert {peer["hostname"] for peer in told["peers"]} == {each.hostname for each in containers} - {
            container.hostname
        }
    for _ in range(3):
        checks = discover(containers[0], "doctor")["checks"]
        if all(each["status"] == "PASS" for each in checks):
            break
    assert {each["status"] for each in checks} == {"PASS"}, checks
