"""What the site needs beside docs/: the documents at the top of the repository, the examples, and links between them.

In the repository a page links to ``../CHANGELOG.md`` and a document at the top to ``docs/cli.md``. In the site all
pages lie in one folder. README is not among them: its place is taken by index.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents at the top as pages, and the examples as files."""
    for name in DOCUMENTS:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(ROOT).as_posix()
            # A browser shows text; it would offer a script for download, or run it.
            files.append(File.generated(config, f"{name}.txt", content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that leave the folder, and drop the names of code blocks, which only the tests read."""
    markdown = re.sub(r"^( *```\w+) .+$", r"\1", markdown, flags=re.MULTILINE)
    if page.file.src_uri in DOCUMENTS:
        markdown = markdown.replace("](docs/", "](")
    markdown = markdown.replace("](../README.md)", "](index.md)").replace("](LICENSE)", "](index.md)")
    markdown = re.sub(r"\]\(\.\./(examples/[^)]*[^)/])\)", r"](\1.txt)", markdown)
    markdown = re.sub(r"\[([^\]]*)\]\(\.\./examples/[^)]*/\)", r"\1", markdown)
    return re.sub(r"\]\(\.\./(\w+\.md)", r"](\1", markdown)
