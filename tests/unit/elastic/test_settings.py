from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mingle.config.launchers import Placement
from mingle.config.settings import VARIABLES
from mingle.config.values import Peer
from mingle.elastic import settings as agent_settings
from mingle.elastic.quorum import Nodes, Policy
from mingle.elastic.settings import AgentSettings
from mingle.errors import ConfigurationError

SLURM = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "7", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_NODEID": "3"}


def resolve(environ: dict[str, str] | None = None, **given: Any) -> AgentSettings:
    arguments: dict[str, Any] = {"run_id": "resnet", "endpoint": "", "minimum": 2, "maximum": 4}
    config = {"timeout": 900, **given.pop("config", {})}  # torch always adds it
    return agent_settings.resolve(environ or {}, **{**arguments, "config": config, **given})


def test_without_options_everything_is_at_its_default() -> None:
    found = resolve()
    assert found.settings.job_id == "resnet"
    assert found.settings.placement == Placement(rank=None, world_size=4)
    assert (found.policy, found.local_addr) == (Policy(nodes=Nodes(minimum=2, maximum=4), last_call=30), None)
    assert (found.settings.port, found.settings.ttl, found.settings.discovery_timeout) == (29499, 1, 300)
    assert found.torch == {"join_timeout": 600, "last_call_timeout": 30, "read_timeout": 60, "timeout": 900}


def test_the_defaults_are_those_of_torch() -> None:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    assert timedelta(seconds=agent_settings.TORCH_DEFAULTS["last_call_timeout"]) == RendezvousTimeout().last_call
    assert timedelta(seconds=agent_settings.TORCH_DEFAULTS["join_timeout"]) == RendezvousTimeout().join


def test_every_key_of_the_rendezvous_configuration(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    torch = {
        "join_timeout": 100,
        "last_call_timeout": 3,
        "close_timeout": 4,
        "heartbeat_timeout": 5,
        "keep_alive_interval": 6,
        "keep_alive_max_attempt": 7,
        "read_timeout": 8,
    }
    own = {
        "interface": "eth0;10.0.0.1",
        "peers": "a;b:7",
        "secret_file": str(secret),
        "port": "7777",
        "ttl": "3",
        "family": "6",
        "discovery_timeout": "12.5",
        "allow_minority": "1",
    }
    found = resolve(config={**own, **{key: str(value) for key, value in torch.items()}})
    settings = found.settings
    assert settings.interfaces == ("eth0", "10.0.0.1")
    assert settings.interfaces_from == "--rdzv-conf interface"
    assert settings.peers == (Peer("a"), Peer("b", 7))
    assert settings.secret == b"s3cret"
    assert (settings.port, settings.ttl, settings.family, settings.discovery_timeout) == (7777, 3, "6", 12.5)
    assert (found.policy.allow_minority, found.policy.last_call) == (True, 3)
    assert found.torch == {**torch, "timeout": 900}
    assert resolve(config={"port": 7777, "allow_minority": True}).policy.allow_minority, "a program may give numbers"
    assert resolve(config={"last_call_timeout": "30"}).policy.last_call_is_set


def test_variables_count_and_options_come_first() -> None:
    environ = {"MINGLE_PORT": "7000", "MINGLE_TTL": "2", "MINGLE_TIMEOUT": "9", "MINGLE_MASTER_PORT": "7001"}
    settings = resolve(environ, config={"ttl": "5"}).settings
    assert (settings.port, settings.ttl, settings.discovery_timeout, settings.master_port) == (7000, 5, 9, 7001)


def test_all_variables_but_those_of_id_rank_and_size_apply() -> None:
    """As docs/torchrun.md says."""
    values = {
        "MINGLE_NODE_RANK": "1",
        "MINGLE_TIMEOUT": "9",
        "MINGLE_INTERFACE": "eth7",
        "MINGLE_PORT": "7000",
        "MINGLE_PEERS": "node2",
        "MINGLE_SECRET": "secret",
        "MINGLE_TTL": "2",
        "MINGLE_FAMILY": "6",
        "MINGLE_ADVERTISE": "192.0.2.7",
        "MINGLE_MASTER_PORT": "7001",
        "MINGLE_MESH": "warn",
        "MINGLE_PROGRESS": "off",
    }
    ignored = {"MINGLE_JOB_ID": "bert", "MINGLE_RANK": "7", "MINGLE_WORLD_SIZE": "9"}
    assert {*values, *ignored, "MINGLE_SECRET_FILE"} == set(VARIABLES)
    plain = resolve().settings
    assert resolve(ignored).settings == plain
    for name, value in values.items():
        assert resolve({name: value}).settings != plain, name
    with pytest.raises(ConfigurationError, match="MINGLE_SECRET_FILE"):
        resolve({"MINGLE_SECRET_FILE": "/nowhere"})


@pytest.mark.parametrize(
    ("environ", "config", "rank", "source"),
    [
        ({"RANK": "5", "WORLD_SIZE": "6"}, {}, None, ""),
        (SLURM, {}, 3, "Slurm's SLURM_NODEID=3"),
        ({**SLURM, "PET_NODE_RANK": "1"}, {}, 1, "PET_NODE_RANK='1'"),
        ({**SLURM, "PET_NODE_RANK": "1", "MINGLE_NODE_RANK": "2"}, {}, 2, "MINGLE_NODE_RANK='2'"),
        ({}, {"node_rank": "2"}, 2, "--rdzv-conf node_rank=2"),
        ({}, {"node_rank": 2}, 2, "--rdzv-conf node_rank=2"),
    ],
)
def test_the_number_of_its_node_is_all_that_an_agent_has_from_a_launcher(
    environ: dict[str, str], config: dict[str, Any], rank: int | None, source: str
) -> None:
    settings = resolve(environ, config=config).settings
    asked = settings.placement
    assert (settings.job_id, asked.rank, asked.world_size) == ("resnet", None, 4)
    assert (asked.node_rank, asked.node_rank_from) == (rank, source)
    assert asked.node_rank_launched is source.startswith("Slurm")


@pytest.mark.parametrize(
    ("environ", "given", "problem"),
    [
        ({}, "x", "--rdzv-conf node_rank='x' is not a whole number"),
        ({}, "-1", "--rdzv-conf node_rank='-1' is negative"),
        ({}, "4", "--rdzv-conf node_rank=4 does not fit a job of 4 nodes"),
        ({"PET_NODE_RANK": "4"}, None, "PET_NODE_RANK='4' does not fit a job of 4 nodes"),
        ({"MINGLE_NODE_RANK": "1.5"}, None, "MINGLE_NODE_RANK='1.5' is not a whole number"),
        ({"MINGLE_NODE_RANK": "1"}, "2", "--rdzv-conf node_rank=2 contradicts MINGLE_NODE_RANK='1'"),
        ({"PET_NODE_RANK": "1"}, "2", "--rdzv-conf node_rank=2 contradicts PET_NODE_RANK='1'"),
        ({"JOB_COMPLETION_INDEX": "1"}, "2", "contradicts Kubernetes Indexed Job's JOB_COMPLETION_INDEX=1"),
    ],
)
def test_a_node_rank_that_cannot_be_is_refused(environ: dict[str, str], given: str | None, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        resolve(environ, config={} if given is None else {"node_rank": given})


@pytest.mark.parametrize(
    ("given", "fixes"),
    [
        pytest.param(
            {"run_id": "none"},
            [
                "torchrun --rdzv-backend=mingle --rdzv-id=NAME --nnodes=2:4 ",
                "PET_RDZV_ID=NAME accelerate launch",
                "notebook_launcher(rdzv_id=NAME)",
            ],
            id="no id",
        ),
        pytest.param({"run_id": "", "minimum": 4}, ["--nnodes=4 "], id="an empty id"),
        pytest.param({"endpoint": "node1:29400"}, ["remove --rdzv-endpoint", "--rdzv-backend=c10d"], id="an endpoint"),
        pytest.param({"endpoint": "None:29500"}, ["add --same_network to"], id="the endpoint that accelerate makes"),
    ],
)
def test_a_command_line_for_another_backend_is_refused_with_what_to_type(
    given: dict[str, Any], fixes: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        resolve(**given)
    assert [fix for fix in fixes if fix not in str(error.value.remedy)] == []


def test_unknown_keys_are_named_with_those_that_are_known() -> None:
    with pytest.raises(ConfigurationError) as error:
        resolve(config={"intreface": "eth0", "store_type": "file"})
    assert "intreface, store_type" in error.value.observation
    known = (*agent_settings.OWN_KEYS, *agent_settings.TORCH_KEYS, "is_host")
    assert [key for key in known if key not in str(error.value.remedy)] == []
    document = (Path(__file__).parents[3] / "docs" / "torchrun.md").read_text(encoding="utf-8")
    assert [key for key in (*agent_settings.TORCH_KEYS, "is_host") if f"`{key}`" not in document] == []


@pytest.mark.parametrize("value", ["0", "1", "true", "'1'"])
def test_the_key_by_which_c10d_chooses_the_host_is_accepted_and_not_passed_on(value: str) -> None:
    assert resolve(config={"is_host": value}) == resolve()


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("text", ["join_timeout=5,last_call_timeout=1,timeout=5", "is_host=1", "interface=eth0;eth1"])
def test_quotes_that_no_shell_has_removed_are_ignored(text: str, quote: str) -> None:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    plain, quoted, inner = (
        resolve(config=_parse_rendezvous_config(each))
        for each in (text, f"{quote}{text}{quote}", re.sub(r"=([^,]*)", rf"={quote}\1{quote}", text))
    )
    assert plain == quoted == inner


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("allow_minority", "perhaps"),
        ("is_host", "perhaps"),
        ("last_call_timeout", "0"),
        ("join_timeout", "ten"),
        ("keep_alive_interval", "1.5"),
    ],
)
def test_a_value_that_can_not_be_used_is_named_by_its_key(key: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"--rdzv-conf {key}="):
        resolve(config={key: value})
