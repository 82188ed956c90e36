"""What the site needs beside docs/: the documents at the top of the repository, the examples, and links between them.

In the repository a page links to ``../CHANGELOG.md`` and a document at the top to ``docs/cli.md``. In the site all
pages lie in one folder, and README is index.md. docs/README.md, the list of pages, is the site's navigation. A page of
the site loads nothing from elsewhere: mermaid is part of it, and the link to the repository asks no code host for its
stars.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
MERMAID = ROOT / ".venv" / "mermaid.min.js"
"""What `make docs` has fetched, where there is npm; without it the diagrams are shown as text."""
STYLE = ROOT / "tools" / "site.css"
HOME = "index.md"
DOCUMENTS = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")


def on_config(config: Any) -> Any:
    """Link to the repository, if PROJECT_URL or the clone's origin names it."""
    from tools.hatch_build import project_url  # needs hatchling

    config.repo_url = project_url(str(ROOT)) or config.repo_url
    config.repo_name = config.repo_url and "source"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the documents at the top as pages, and the examples as files."""
    from mkdocs.structure.files import File  # here, so that a test can import this module without mkdocs

    for name in DOCUMENTS:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, HOME, abs_src_path=str(ROOT / "README.md")))
    files.append(File.generated(config, "assets/site.css", abs_src_path=str(STYLE)))
    if MERMAID.exists():
        files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(MERMAID)))
    for name in examples(ROOT):
        # A browser shows text; it would offer a script for download, or run it.
        files.append(File.generated(config, f"{name}.txt", content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def examples(root: Path) -> list[str]:
    """Return the names of the examples, without what they have written: the files that git tracks.

    An sdist has only those, but git knows nothing of it.
    """
    try:
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "examples"], cwd=root, capture_output=True, check=False
        ).stdout
    except OSError:  # no git
        tracked = b""
    names = [name for name in tracked.decode().split("\0") if name and (root / name).is_file()]
    files = (path for path in root.glob("examples/**/*") if path.is_file() and "__pycache__" not in path.parts)
    return names or sorted(path.relative_to(root).as_posix() for path in files)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that leave the folder, and drop the names of code blocks, which only the tests read."""
    markdown = re.sub(r"^( *```\w+) .+$", r"\1", markdown, flags=re.MULTILINE)
    if page.file.src_uri == HOME:
        page.meta["hide"] = ["navigation", "toc"]
        markdown = markdown.replace("[All pages](docs/README.md) · ", "")
    if page.file.src_uri in (HOME, *DOCUMENTS):
        markdown = markdown.replace("](docs/", "](")
        # What else the repository has is no page.
        markdown = re.sub(r"\[([^\]]*)\]\((?!https?:|pictures/)[\w.-]+/[^)]*\)", r"\1", markdown)
    markdown = markdown.replace("](../README.md)", "](index.md)").replace("](LICENSE)", "](index.md)")
    markdown = re.sub(r"\]\(\.\./(examples/[^)]*[^)/])\)", r"](\1.txt)", markdown)
    markdown = re.sub(r"\[([^\]]*)\]\(\.\./examples/[^)]*/\)", r"\1", markdown)
    return re.sub(r"\]\(\.\./(\w+\.md)", r"](\1", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Mark the options and the home page for the style, and give a page with diagrams what draws them."""
    html = re.sub(r"(?<![\w-])--[a-z][\w-]*(?=[^<>]*<)", r'<span class="option">\g<0></span>', html)
    if page.file.src_uri == HOME:
        return f'<div class="home">\n{html}\n</div>'
    if 'class="mermaid"' not in html:
        return html
    if not MERMAID.exists():
        return html.replace('class="mermaid"', 'class="highlight"')
    return f'{html}\n<script src="assets/mermaid.min.js"></script>'


def on_post_page(output: str, **_: Any) -> str:
    """Drop the mark by which the theme's script asks a code host for the repository's stars."""
    return output.replace(' data-md-component="source"', "")
