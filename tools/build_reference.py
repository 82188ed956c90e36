"""docs/reference.md, made from the docstrings: ``python tools/build_reference.py`` writes it, a test compares it.

What stands below the mark is typed by hand.

A page that anybody can read where it lies, on a code host or in the site, and no plug-in of either.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import mingle

DOCUMENT = Path(__file__).parents[1] / "docs" / "reference.md"

INTRODUCTION = """\
# API reference

All public names of the package. [Compatibility](#compatibility) says what a version number covers.
"""
END = "\n<!-- made from the docstrings: end -->\n"
LIGHTNING = "mingle.lightning.MingleEnvironment"


def page() -> str:
    """Return the whole page."""
    functions = [mingle.init, mingle.discover]
    classes = [mingle.Job, mingle.Member]
    errors = [getattr(mingle, name) for name in mingle.__all__ if name.endswith("Error")]
    errors.sort(key=lambda error: (error is not mingle.MingleError, error.__name__))
    assert {each.__name__ for each in [*functions, *classes, *errors]} == set(mingle.__all__) - {"__version__"}
    parts = [INTRODUCTION]
    parts += [
        _section("mingle.init", mingle.init, _signature(mingle.init)),
        _section("mingle.discover", mingle.discover),
    ]
    parts += [_section(f"mingle.{each.__name__}", each) + _methods(each) for each in classes]
    parts += ["## Errors\n"]
    parts += [_section(f"mingle.{each.__name__}", each, level=3) for each in errors]
    parts += ["## mingle.\\_\\_version\\_\\_\n\nThe version of the package, as text.\n"]
    parts += [
        f"## {LIGHTNING}\n\nThe [plug-in for Lightning](frameworks.md#lightning). It takes the arguments of "
        "`mingle.discover`.\n"
    ]
    return "\n".join(parts) + END + DOCUMENT.read_text(encoding="utf-8").partition(END)[2]


def _signature(function: Callable[..., mingle.Job]) -> str:
    signature = inspect.signature(function)
    lines = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default}"
        lines.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    body = "".join(f"    {line},\n" for line in lines)
    return f"```text\nmingle.{function.__name__}(\n{body}) -> mingle.{signature.return_annotation}\n```\n\n"


def _methods(kind: type) -> str:
    """Return the public methods and properties that have a docstring."""
    found = []
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        shown = name if isinstance(member, property) else f"{name}()"
        said = " ".join(_roles(inspect.getdoc(member) or "").split())
        found.append(f"- **`{shown}`**: {said}\n")
    return "".join(found) + "\n" if found else ""


def _section(title: str, thing: object, signature: str = "", level: int = 2) -> str:
    text = inspect.getdoc(thing) or ""
    return f"{'#' * level} {title}\n\n{signature}{_markdown(text)}"


_PART = re.compile(r"^(Args|Attributes|Raises|Returns):\n((?:(?: {4}.*)?\n?)+)", re.MULTILINE)


def _markdown(text: str) -> str:
    """Return a docstring in Google's form as Markdown."""
    text = _PART.sub(lambda found: _list(found[1], textwrap.dedent(found[2])), text + "\n")
    return re.sub(r"\n{3,}", "\n\n", _roles(text)).strip() + "\n"


def _list(part: str, body: str) -> str:
    if part == "Returns":
        return f"**Returns**: {body.strip()}\n\n"
    found = re.finditer(r"^(\S+): (.*(?:\n +.*)*)", body, re.MULTILINE)
    items = [(item[1], " ".join(item[2].split())) for item in found]
    title = {"Args": "Arguments"}.get(part, part)
    return f"**{title}**\n\n" + "".join(f"- **`{name}`**: {said}\n" for name, said in items) + "\n"


def _roles(text: str) -> str:
    """Replace Sphinx's roles and double backticks by code in Markdown."""
    text = re.sub(r":(?:func|class|meth|mod):`~?([\w.]+)`", r"`\1`", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
