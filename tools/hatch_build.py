"""What the build decides: the project's URLs, README's links that lead there, and where netifaces comes from.

README's links are relative, so that they work in a clone and on a code host. On a package index they would lead
nowhere, so they are made absolute when a distribution is built. The address is that of PROJECT_URL, or else of the
clone's origin if that is on GitHub; where neither is known, links become plain text and pictures their description.
A wheel that is built from an sdist takes all of it from there.

netifaces comes as source only. Where it cannot be compiled, the wheel requires tools/netifaces in its place, which
brings netifaces-plus. pip builds that wheel before it downloads any dependency; uv reads tool.uv.sources.
"""

from __future__ import annotations

import os
import re
import shlex
import site
import subprocess
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:)([^)\s]*)\)")
_ON_GITHUB = re.compile(r"(?:https://|ssh://git@|git@)github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?")


class MetadataHook(MetadataHookInterface):
    """Fills in the fields that pyproject.toml calls dynamic."""

    def update(self, fields: dict[str, object]) -> None:
        """Set the long description and the URLs."""
        url = project_url(self.root)
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        fields["readme"] = {"content-type": "text/markdown", "text": absolute(text, url)}
        fields["urls"] = urls(url) if url else {}


class BuildHook(BuildHookInterface[Any]):
    """Adds a requirement to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Require tools/netifaces where pip would try in vain to compile netifaces."""
        if not (is_installed("netifaces") or compiles()):
            uri = Path(self.root, "tools", "netifaces").as_uri()
            build_data["dependencies"].append(f"netifaces @ {uri}")


def is_installed(name: str) -> bool:
    """Return whether the environment that pip installs into has the distribution; an isolated build can't import it."""
    return any(metadata.distributions(name=name, path=site.getsitepackages()))


def compiles() -> bool:
    """Return whether the compiler that setuptools calls is here and finds Python's headers."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    headers = [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("#include <Python.h>\n", encoding="utf-8")
        command = [*compiler, *headers, "-c", str(source), "-o", f"{source}.o"]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:  # no such program
            return False


def project_url(root: str) -> str | None:
    """Return the project's address without a slash at its end, or None if it is not known here."""
    if told := os.environ.get("PROJECT_URL"):
        return told.rstrip("/")
    command = ["git", "-C", root, "config", "--get", "remote.origin.url"]
    try:
        origin = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return None
    found = _ON_GITHUB.fullmatch(origin)
    return f"https://github.com/{found[1]}" if found else None


def urls(url: str) -> dict[str, str]:
    """Return the links of the project's page on a package index."""
    pages = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md"}
    return {
        "Source": url,
        **{name: f"{url}/blob/HEAD/{path}" for name, path in pages.items()},
        "Issues": f"{url}/issues",
    }


def absolute(text: str, url: str | None) -> str:
    """Return the text without relative links."""

    def replaced(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        if url is None:
            return f"*{label}*" if picture else label
        if target.startswith("#"):
            return f"[{label}]({url}{target})"
        return f"{picture}[{label}]({url}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return _LINK.sub(replaced, text)
