"""How many agents found a session of an elastic job, and how many keep it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mingle.elastic.quorum import Nodes, Policy
from mingle.errors import ConfigurationError


@pytest.mark.parametrize(
    ("minimum", "maximum", "founders", "keepers"),
    [
        (1, 1, 1, 1),
        (1, 2, 2, 1),
        (2, 2, 2, 1),
        (2, 3, 2, 2),
        (1, 3, 2, 2),
        (3, 3, 3, 1),
        (2, 4, 3, 2),
        (2, 5, 3, 3),
        (5, 5, 5, 1),
        (8, 16, 9, 8),
    ],
)
def test_the_sizes(minimum: int, maximum: int, founders: int, keepers: int) -> None:
    nodes = Nodes(minimum=minimum, maximum=maximum)
    assert (nodes.founders, nodes.keepers) == (founders, keepers)


def test_the_document_has_the_right_sizes() -> None:
    text = (Path(__file__).parents[3] / "docs" / "torchrun.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\d+):(\d+)` \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) >= 5
    for row in rows:
        test_the_sizes(*map(int, row))


def test_founders_and_keepers_always_share_an_agent() -> None:
    every = [Nodes(minimum=low, maximum=high) for high in range(1, 40) for low in range(1, high + 1)]
    assert all(nodes.founders + nodes.keepers > nodes.maximum for nodes in every)
    assert all(2 * nodes.founders > nodes.maximum for nodes in every)
    assert all(nodes.minimum <= nodes.founders <= nodes.maximum for nodes in every)


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 1), (3, 2), (1, 100_000)])
def test_numbers_that_make_no_sense(minimum: int, maximum: int) -> None:
    with pytest.raises(ConfigurationError, match="--nnodes=MIN:MAX"):
        Nodes(minimum=minimum, maximum=maximum)


def test_small_start_is_for_inexperienced_agents_or_where_allowed() -> None:
    nodes = Nodes(minimum=2, maximum=5)
    policy, lenient = (Policy(nodes=nodes, last_call=1.0, allow_minority=allowed) for allowed in (False, True))
    assert [policy.may_start_small(experienced=each) for each in (False, True)] == [True, False]
    assert lenient.may_start_small(experienced=True)
    assert [policy.to_keep(had_quorum=each) for each in (False, True)] == [2, 3]
    assert [lenient.to_keep(had_quorum=each) for each in (False, True)] == [2, 2]
    strict = Policy(nodes=Nodes(minimum=3, maximum=4), last_call=1.0, allow_minority=True)
    assert strict.to_keep(had_quorum=True) == 2, "allowing a minority makes nothing stricter"
