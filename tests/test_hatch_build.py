"""hatch_build.py: what a package index shows has no link that leads nowhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import hatch_build
import pytest

from tests.test_docs import README, ROOT, read

URL = "https://code.example/ada/mingle"


def targets(text: str) -> list[str]:
    return re.findall(r"\]\(([^)]*)\)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def test_links_and_pictures_of_readme_lead_to_the_project() -> None:
    text = hatch_build.absolute(read(README), URL)
    assert len(targets(text)) == len(targets(read(README))) > 10
    assert [target for target in targets(text) if not target.startswith((URL, "https://"))] == []
    assert f"]({URL}/raw/HEAD/docs/pictures/watch.svg)" in text
    assert f"]({URL}#a-torch-init-method)" in text
    for path in re.findall(re.escape(URL) + r"/(?:raw|blob)/HEAD/([^)#]+)", text):
        assert (ROOT / path).exists(), path


def test_without_an_address_no_link_is_left() -> None:
    text = hatch_build.absolute(read(README), None)
    assert [target for target in targets(text) if not target.startswith("https://")] == []
    assert "or set a secret." in text
    assert "*mingle-discover watch: three jobs" in text


def test_a_link_whose_text_is_code_or_holds_brackets() -> None:
    assert hatch_build.absolute("[`a[0]`](b.md#c)", URL) == f"[`a[0]`]({URL}/blob/HEAD/b.md#c)"
    assert hatch_build.absolute("[a](https://b.example)", URL) == "[a](https://b.example)"


@pytest.mark.parametrize(
    ("origin", "url"),
    [
        ("git@github.com:ada/mingle.git", "https://github.com/ada/mingle"),
        ("https://github.com/ada/mingle", "https://github.com/ada/mingle"),
        ("ssh://git@github.com/ada/mingle.git", "https://github.com/ada/mingle"),
        ("/srv/mirrors/mingle.git", None),
        ("https://elsewhere.example/ada/mingle.git", None),
    ],
)
def test_the_address_is_that_of_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str, url: str | None
) -> None:
    monkeypatch.delenv("PROJECT_URL", raising=False)
    assert hatch_build.project_url(str(tmp_path)) is None
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", origin], check=True)
    assert hatch_build.project_url(str(tmp_path)) == url
    monkeypatch.setenv("PROJECT_URL", f"{URL}/")
    assert hatch_build.project_url(str(tmp_path)) == URL


def test_the_project_has_links_to_its_pages() -> None:
    for name, link in hatch_build.urls(URL).items():
        path = link.partition("/blob/HEAD/")[2]
        assert link.startswith(URL)
        assert not path or (ROOT / path).exists(), name
