"""The pictures of the documents can be drawn again, and need nothing from elsewhere."""

from __future__ import annotations

import re

import pytest

from . import Lab
from .pictures import (
    PICTURES,
    check_picture,
    doctor_picture,
    examined,
    slow_receiver,
    watch_picture,
    watched,
)

NAMES = ("watch", "ping", "doctor", "check")


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_stands_alone(name: str) -> None:
    text = PICTURES.joinpath(f"{name}.svg").read_text(encoding="utf-8")
    assert text.startswith("<svg")
    assert "@font-face" not in text
    assert "url(http" not in text
    documents = [PICTURES.parent.parent / "README.md", *PICTURES.parent.glob("*.md")]
    assert any(f"pictures/{name}.svg" in document.read_text(encoding="utf-8") for document in documents)


def words(svg: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", svg).replace("&#160;", " "))


def test_pictures_show_what_the_commands_print(lab: Lab) -> None:
    examination = examined(lab).start(doctor_picture)
    assert "resent seeking" in words(watched(lab).start(watch_picture).result())
    assert "nft insert rule inet lab input ip saddr 10.78.0.0/24 udp dport 29499 accept" in words(examination.result())


@pytest.mark.timeout(240)
def test_the_matrix_is_drawn_of_a_check(lab: Lab) -> None:
    drawn = words(slow_receiver(lab).start(check_picture).result(120))
    assert "MB/s from ↓ to → node0 node1 node2 node3" in drawn
    assert "FAULT: all links to node2" in drawn
