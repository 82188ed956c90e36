"""The placeholders in a command of mingle-run: what is filled in, what stays, what is refused."""

from __future__ import annotations

import re

import pytest

from mingle.errors import ConfigurationError
from mingle.run import placeholders

KNOWN = {
    "master_addr": "10.0.0.1",
    "master_port": 4242,
    "node_rank": 0,
    "nnodes": 3,
    "address": "10.0.0.2",
    "interface": "eth0",
    "my_port": 4243,
    "hosts": "10.0.0.1,10.0.0.2",
    "hostports": "10.0.0.1:4244,10.0.0.2:4243",
    "hostfile": "/tmp/hosts",
}


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("--master={master_addr}:{master_port}", "--master=10.0.0.1:4242"),
        ("{node_rank}{nnodes}", "03"),
        ("{address}%{interface}", "10.0.0.2%eth0"),
        ("-H {hosts} --listen={my_port}", "-H 10.0.0.1,10.0.0.2 --listen=4243"),
        ("{hostfile}:{hostports}", "/tmp/hosts:10.0.0.1:4244,10.0.0.2:4243"),
        ("{{node_rank}}", "{node_rank}"),
        ("{{{node_rank}}}", "{{node_rank}}"),
        ("{{other}}", "{other}"),
        ("${HOME}/{node_rank}", "${HOME}/0"),
        ('{"a": {"b": {}}, "c": [{"d":1}]}', '{"a": {"b": {}}, "c": [{"d":1}]}'),
        ("{} {1} {a b} {a-b} { node_rank } {{ node_rank }} {", "{} {1} {a b} {a-b} { node_rank } {{ node_rank }} {"),
        ("{node_rank", "{node_rank"),
        ("", ""),
    ],
)
def test_placeholders_are_filled_in_and_other_braces_stay(word: str, filled: str) -> None:
    assert placeholders.fill([word], KNOWN) == [filled]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("{master_adr}", "write {master_addr}"),
        ("{MASTER_PORT}", "write {master_port}"),
        ("{zzz}", "the placeholders are {master_addr}, {master_port}"),
        ("a{_}b", "for the text {_} itself write {{_}}"),
    ],
)
def test_an_unknown_placeholder_is_an_error_that_says_how_to_write_it(word: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(hint)):
        placeholders.check(["fine", word])
