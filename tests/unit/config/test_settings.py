from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mingle.config import settings, values
from mingle.config.launchers import Placement
from mingle.config.settings import Arguments, Network, Peer, Settings
from mingle.errors import ConfigurationError, LauncherError
from tests.support.launcher_environments import TORCHRUN

SRUN_TASK = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


def resolve(environ: Mapping[str, str], **arguments: Any) -> Settings:
    return settings.resolve(environ, Arguments(**arguments))


def resolve_network(environ: Mapping[str, str], **arguments: Any) -> Network:
    return settings.resolve_network(environ, Arguments(**arguments))


def test_defaults() -> None:
    assert resolve({}, job_id="j", rank=0, world_size=2) == Settings(
        job_id="j",
        placement=Placement(rank=0, world_size=2),
        discovery_timeout=300.0,
        interfaces=(),
        interfaces_from="",
        peers=(),
        folders=(),
        secret=None,
        port=29499,
        master_port=None,
        ttl=1,
        family="auto",
        advertise=None,
        progress="auto",
        master_addr=None,
        mesh="on",
    )


BY_VARIABLE = {
    "MINGLE_JOB_ID": "j",
    "MINGLE_RANK": "1",
    "MINGLE_WORLD_SIZE": "2",
    "MINGLE_NODE_RANK": "1",
    "MINGLE_TIMEOUT": "2.5",
    "MINGLE_MESH": "warn",
    "MINGLE_INTERFACE": "eth0, 10.0.0.1",
    "MINGLE_PORT": "1000",
    "MINGLE_PEERS": "a,b:2,dir:/shared/mingle",
    "MINGLE_SECRET": "s",
    "MINGLE_TTL": "0",
    "MINGLE_FAMILY": "6",
    "MINGLE_ADVERTISE": "2001:db8::1",
    "MINGLE_MASTER_PORT": "2000",
    "MINGLE_PROGRESS": "off",
}
FROM_VARIABLES = Settings(
    job_id="j",
    placement=Placement(rank=1, world_size=2, node_rank=1, node_rank_from="MINGLE_NODE_RANK='1'"),
    discovery_timeout=2.5,
    interfaces=("eth0", "10.0.0.1"),
    interfaces_from="MINGLE_INTERFACE",
    port=1000,
    peers=(Peer("a"), Peer("b", 2)),
    folders=("dir:/shared/mingle",),
    secret=b"s",
    ttl=0,
    family="6",
    advertise="2001:db8::1",
    master_port=2000,
    progress="off",
    mesh="warn",
)


def test_every_variable() -> None:
    assert resolve(BY_VARIABLE) == FROM_VARIABLES


def test_the_table_of_variables_is_complete() -> None:
    source = Path(settings.__file__).read_text() + Path(settings.__file__).with_name("placement.py").read_text()
    assert {*settings.VARIABLES, *settings.WRITTEN} >= set(re.findall(r'"(MINGLE_[A-Z_]+)"', source))
    assert settings.VARIABLES.keys() == {*BY_VARIABLE, "MINGLE_SECRET_FILE"}


def test_arguments_come_before_variables() -> None:
    placed = {"MINGLE_RANK", "MINGLE_WORLD_SIZE", "MINGLE_NODE_RANK"}
    found = resolve(
        {name: value for name, value in BY_VARIABLE.items() if name not in placed},
        job_id="k",
        rank=0,
        world_size=3,
        discovery_timeout=timedelta(minutes=1),
        interface=["lo"],
        peers=["c"],
        secret=b"t",
        port=3000,
        master_port=4000,
        ttl=5,
        family=4,
        advertise="10.0.0.9",
        node_rank=2,
        mesh="on",
    )
    assert found == Settings(
        job_id="k",
        placement=Placement(rank=0, world_size=3, node_rank=2, node_rank_from="node_rank=2"),
        discovery_timeout=60.0,
        interfaces=("lo",),
        interfaces_from="interface=",
        peers=(Peer("c"),),
        secret=b"t",
        port=3000,
        master_port=4000,
        ttl=5,
        family="4",
        advertise="10.0.0.9",
        progress="off",
        mesh="on",
    )


def test_blank_variables_do_not_count() -> None:
    may_be_blank = settings.VARIABLES.keys() - {"MINGLE_JOB_ID", "MINGLE_SECRET", "MINGLE_SECRET_FILE"}
    assert resolve(dict.fromkeys(may_be_blank, " "), job_id="j", world_size=2) == resolve({}, job_id="j", world_size=2)


@pytest.mark.parametrize("job_id", ["x", "x" * 256, "é" * 128, "ƒJ2k", "a b/c?d#e%20\n", "\x00"])
def test_any_text_is_a_job_id(job_id: str) -> None:
    assert resolve({}, job_id=job_id, world_size=2).job_id == job_id


@pytest.mark.parametrize(
    ("environ", "argument", "expected"),
    [
        ({"MINGLE_JOB_ID": "m"}, "a", "a"),
        ({"MINGLE_JOB_ID": ""}, "a", "a"),
        ({**SRUN_TASK, "MINGLE_JOB_ID": "m"}, None, "m"),
        (SRUN_TASK, None, "77.0"),
        (SRUN_TASK, "a", "a"),
        (TORCHRUN, None, "run-7"),
        (TORCHRUN, "a", "a"),
    ],
)
def test_where_the_job_id_comes_from(environ: dict[str, str], argument: str | None, expected: str) -> None:
    size = None if {"SLURM_JOB_ID", "RANK"} & environ.keys() else 2
    assert resolve(environ, job_id=argument, world_size=size).job_id == expected


@pytest.mark.parametrize("job_id", ["gloo", "nccl", "NCCL", "mpi", "ucc", "xccl", "cpu:gloo,cuda:nccl", "cuda:nccl"])
def test_the_name_of_a_backend_is_no_job_id(job_id: str) -> None:
    for environ, argument in (({}, job_id), ({"MINGLE_JOB_ID": job_id}, None)):
        with pytest.raises(ConfigurationError, match="is the name of a torch backend") as caught:
            resolve(environ, job_id=argument)  # also before the missing world size is noticed
        assert "backend=" in str(caught.value.remedy)


@pytest.mark.parametrize("job_id", ["gloo-test", "resnet", "gloo resnet", "cpu:", "", "a,b"])
def test_job_id_that_resembles_a_backend_is_accepted(job_id: str) -> None:
    settings.refuse_backend(job_id, "job_id")


def test_a_launchers_job_id_may_be_the_name_of_a_backend() -> None:
    assert resolve({**TORCHRUN, "TORCHELASTIC_RUN_ID": "gloo"}).job_id == "gloo"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MINGLE_JOBID", "MINGLE_JOB_ID"),
        ("MINGLE_JOB", "MINGLE_JOB_ID"),
        ("MINGLE_INTEFACE", "MINGLE_INTERFACE"),
        ("MINGLE_WORLDSIZE", "MINGLE_WORLD_SIZE"),
        ("MINGLE_SECRETFILE", "MINGLE_SECRET_FILE"),
        ("MINGLE_LAB_HOSTS", None),
        ("MINGLE_X", None),
    ],
)
def test_a_variable_that_looks_like_one_of_ours(name: str, meant: str | None) -> None:
    known = {"MINGLE_RANK": "0", "PATH": "", **dict.fromkeys(settings.WRITTEN, "of a worker")}
    assert settings.unknown_variables({name: "x", **known}) == {name: meant}


@pytest.mark.parametrize(
    ("environ", "argument", "interfaces", "where"),
    [
        ({}, None, (), ""),
        ({}, "eth0", ("eth0",), "interface="),
        ({}, "eth0,eth1", ("eth0", "eth1"), "interface="),
        ({}, ["eth0", "fe80::1%eth1", "eth0"], ("eth0", "fe80::1%eth1"), "interface="),
        ({"MINGLE_INTERFACE": "a"}, [], ("a",), "MINGLE_INTERFACE"),
        ({"MINGLE_INTERFACE": "a", "GLOO_SOCKET_IFNAME": "b"}, "c", ("c",), "interface="),
        ({"MINGLE_INTERFACE": "a", "GLOO_SOCKET_IFNAME": "b"}, None, ("a",), "MINGLE_INTERFACE"),
        ({"GLOO_SOCKET_IFNAME": "b"}, None, ("b",), "GLOO_SOCKET_IFNAME"),
        ({"GLOO_SOCKET_IFNAME": "b,c"}, None, ("b", "c"), "GLOO_SOCKET_IFNAME"),
        ({"GLOO_SOCKET_IFNAME": "^docker0"}, None, (), ""),
        ({"GLOO_SOCKET_IFNAME": "=eth0"}, None, (), ""),
        ({"GLOO_SOCKET_IFNAME": "eth0,^docker0"}, None, (), ""),
        ({"GLOO_SOCKET_IFNAME": "10.0.0.5"}, None, (), ""),
        ({"GLOO_SOCKET_IFNAME": ""}, None, (), ""),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, None, (), ""),
    ],
)
def test_where_interfaces_are_named(
    environ: dict[str, str], argument: str | list[str] | None, interfaces: tuple[str, ...], where: str
) -> None:
    found = resolve_network(environ, interface=argument)
    assert (found.interfaces, found.interfaces_from) == (interfaces, where)


@pytest.mark.parametrize(
    ("named", "refused"),
    [
        ("^lo,docker0", "'^lo'"),
        ("=eth0", "'=eth0'"),
        ("10.0.0.5", "'10.0.0.5'"),
        ("eth0,fe80::1%eth0", "'fe80::1%eth0'"),
        ("eth0,eth1", ""),
        ("", ""),
    ],
)
def test_a_value_of_nccl_in_gloos_variable_is_known(named: str, refused: str) -> None:
    problem = settings.gloo_problem({"GLOO_SOCKET_IFNAME": named})
    assert (problem is not None) == bool(refused)
    if problem is not None:
        assert f"an interface with the name {refused}" in str(problem)
        assert "only NCCL_SOCKET_IFNAME takes '^' and '='" in str(problem)


@pytest.mark.parametrize(("variable", "service"), [("MINGLE_PORT", "mingle"), ("MINGLE_MASTER_PORT", "mingle-master")])
def test_a_port_that_kubernetes_sets_for_a_service(variable: str, service: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{variable}='tcp://.* not a number(?s:.*)here {service}\n"):
        resolve({variable: "tcp://10.96.7.1:29500"}, job_id="j", rank=0, world_size=2)
    argument = variable.removeprefix("MINGLE_").lower()
    given = resolve({variable: "tcp://10.96.7.1:29500"}, job_id="j", rank=0, world_size=2, **{argument: 29500})
    assert getattr(given, argument) == 29500


def test_a_secret_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"k\n")
    assert resolve_network({"MINGLE_SECRET_FILE": str(path)}).secret == b"k"
    assert resolve_network({"MINGLE_SECRET_FILE": str(path)}, secret="t").secret == b"t"
    assert resolve_network({}, secret="t", secret_file="/a pipe that was read").secret == b"t"
    assert resolve_network({"MINGLE_SECRET": " k\t"}).secret == b" k\t", "the secret, and no other one"


def test_torchrun_passes_through_with_everything_filled_in() -> None:
    found = resolve(TORCHRUN)
    assert (found.master_addr, found.master_port) == ("10.0.0.1", 29500)
    assert resolve({**TORCHRUN, "MINGLE_MASTER_PORT": "1"}, master_port=2).master_port == 29500
    told = found.placement
    assert (told.rank, told.world_size, told.local_rank, told.local_world_size) == (5, 8, 1, 4)
    assert (told.node_rank, told.num_nodes, told.attempt) == (1, 2, "2")


def beside(environ: dict[str, str] | None = None, **arguments: Any) -> Settings:
    return resolve(
        {**TORCHRUN, **(environ or {})}, **{"rank": 1, "world_size": 2, "may_leave_torchrun": True, **arguments}
    )


@pytest.mark.parametrize("named", [{"job_id": "pair"}, {"environ": {"MINGLE_JOB_ID": "pair"}}])
def test_a_job_of_another_name_than_torchruns_stands_beside_it(named: dict[str, Any]) -> None:
    found = beside(**named)
    assert (found.job_id, found.placement, found.beside_torchrun) == ("pair", Placement(rank=1, world_size=2), True)
    assert (found.master_addr, found.master_port) == (None, None)
    # Equal to torchrun's by chance: other members of the job may be no workers of this torchrun.
    assert beside(rank=5, world_size=8, **named).beside_torchrun
    assert beside(master_port=7, **named).master_port == 7


@pytest.mark.parametrize(
    "arguments",
    [
        {"job_id": "run-7"},
        {"job_id": None},
        {"job_id": "pair", "world_size": None},
        {"job_id": "pair", "rank": None},
        {"job_id": "pair", "may_leave_torchrun": False},
    ],
    ids=["torchrun's id", "no id", "a rank alone", "a size alone", "by mingle.init"],
)
def test_all_else_must_agree_with_torchrun(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="torchrun's"):
        beside(**arguments)


def test_job_under_torchruns_own_id_keeps_torchruns_master() -> None:
    found = beside(job_id="run-7", rank=5, world_size=8)
    assert (found.master_addr, found.beside_torchrun) == ("10.0.0.1", False)


@pytest.mark.parametrize(
    ("environ", "job_id"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, "j"),
        ({**SRUN_TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, None),
    ],
    ids=["by hand", "another launcher"],
)
def test_an_address_that_is_not_torchruns_does_not_pass_through(environ: dict[str, str], job_id: str | None) -> None:
    found = resolve(environ, job_id=job_id, may_leave_torchrun=True)
    assert (found.placement.rank, found.master_addr, found.master_port) == (1, None, None)
    assert not found.beside_torchrun


SECRETS = {"MINGLE_SECRET": "", "MINGLE_SECRET_FILE": "/x"}


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        # The jobs of a template that fails to fill it in must not begin in some other way than was written.
        pytest.param({**SRUN_TASK, "MINGLE_JOB_ID": ""}, {}, "MINGLE_JOB_ID='' is empty", id="empty beside a launcher"),
        pytest.param({"MINGLE_JOBID": "x"}, {}, "MINGLE_JOBID is set.*did you mean MINGLE_JOB_ID", id="mistyped"),
        pytest.param({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x" * 257}, {}, "torchrun's id", id="the launcher's id"),
        pytest.param({}, {"family": 4, "advertise": "2001:db8::1"}, "advertise=", id="advertised IPv6, family 4"),
        pytest.param({}, {"family": 6, "advertise": "10.0.0.1"}, "advertise=", id="advertised IPv4, family 6"),
        pytest.param(SECRETS, {}, "both MINGLE_SECRET and MINGLE_SECRET_FILE", id="two secrets, one empty"),
        pytest.param({**SECRETS, "MINGLE_SECRET": "s"}, {}, "both MINGLE_SECRET and", id="two secrets"),
        pytest.param({"MINGLE_PEERS": "a:port,sftp://ann:hunter2@store/x"}, {}, "with a password", id="a password"),
        *(pytest.param({**TORCHRUN, "MASTER_PORT": port}, {}, "MASTER_PORT", id=port) for port in ("x", "0", "65536")),
    ],
)
def test_settings_that_cannot_be(environ: dict[str, str], arguments: dict[str, Any], words: str) -> None:
    size = {} if {"SLURM_PROCID", "RANK"} & environ.keys() else {"world_size": 2}
    with pytest.raises((ConfigurationError, LauncherError), match=words) as caught:
        resolve(environ, **size, **arguments)
    assert isinstance(caught.value, LauncherError) == ("MASTER_PORT" in words)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("job_id", "side"), [("-resnet", "begins"), ("resnet-", "ends"), ("-", "begins"), ("a-b", ""), ("ada-resnet", "")]
)
def test_a_job_id_with_a_variable_that_was_unset_causes_a_warning(job_id: str, side: str) -> None:
    resolve({}, job_id=job_id, rank=0, world_size=1)
    remarks = values.remarks(None)
    assert len(remarks) == bool(side)
    assert all(f"the job id {job_id!r} {side} with '-'" in each and "unset" in each for each in remarks)
    assert values.remarks(None) == []
