"""Metadata that depends on where the project is hosted: its URLs, and README with links that lead there.

README's links are relative, so that they work in a clone and on a code host. On a package index they would lead
nowhere, so they are made absolute when a distribution is built. The address is that of PROJECT_URL, or else of the
clone's origin if that is on GitHub; where neither is known, links become plain text and pictures their description.
A wheel that is built from an sdist takes all of it from there.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:)([^)\s]*)\)")
_ON_GITHUB = re.compile(r"(?:https://|ssh://git@|git@)github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?")


class MetadataHook(MetadataHookInterface):
    """Fills in the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, object]) -> None:
        """Set the long description and the URLs."""
        url = project_url(self.root)
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, url)}
        metadata["urls"] = urls(url) if url else {}


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
