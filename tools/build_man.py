"""docs/man, the manual pages, made from the commands: ``python tools/build_man.py`` writes them, a test compares them.

The wheel installs them under share/man, where ``man`` finds them beside the scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click

from mingle import cli
from mingle.check.command import check
from mingle.config.settings import DEFAULT_MESH, VARIABLES
from mingle.run.command import MESH, run

FOLDER = Path(__file__).parents[1] / "docs" / "man"
DISCOVER_STATUS = [
    ("0", "Done, also with warnings, and for a `list` that found no job."),
    ("1", "`find` found no job, `list --fail-if-empty` found none, `ping` reached no host, or a check failed."),
    ("2", "Wrong usage: an option, an argument or a MINGLE_* variable cannot be used."),
    ("130, 143", "Ended by Ctrl-C, by SIGTERM. Ctrl-C is the normal end of `watch`, `ping` and `doctor --serve`."),
]


def pages() -> dict[str, str]:
    """Return the text of each page in roff, by its file's name."""
    return {"mingle-discover.1": discover_page(), "mingle-check.1": check_page(), "mingle-run.1": run_page()}


def discover_page() -> str:
    """Return the page of ``mingle-discover``: its commands, then the options that they share."""
    main = click.Context(cli.main, info_name="mingle-discover")
    commands = {name: cli.main.get_command(main, name) for name in cli.COMMANDS}
    options = {name: list(_options(command)) for name, command in commands.items() if command}
    every = [option for each in options.values() for option in each]
    ambiguous = {term for term, text in every if any(other == term and said != text for other, said in every)}
    shared = [each for each in dict.fromkeys(every) if every.count(each) > 1 and each[0] not in ambiguous]
    lines = _head("mingle-discover", cli.main, "\\fICOMMAND\\fR [\\fIOPTION\\fR]... [\\fIARGUMENT\\fR]")
    lines.append(".SH COMMANDS")
    for name, command in commands.items():
        assert command is not None
        context = click.Context(command, info_name=name, parent=main)
        lines += [
            f".SS {_escaped(' '.join([name, *command.collect_usage_pieces(context)]))}",
            *_paragraphs(command.help),
        ]
        lines += _definitions(option for option in options[name] if option not in shared)
        lines += [".PP", *_lines(command.epilog or "")]
    lines += [".SH OPTIONS OF SEVERAL COMMANDS", *_definitions(shared)]
    return _text([*lines, *_tail(DISCOVER_STATUS, "mingle-check", VARIABLES)])


def check_page() -> str:
    """Return the page of ``mingle-check``."""
    lines = [*_head("mingle-check", check, "[\\fIOPTION\\fR]..."), ".SH OPTIONS", *_definitions(_options(check))]
    lines += [".SH EXAMPLE", *_lines((check.epilog or "").removeprefix("Example: "))]
    status = [
        ("0", "Healthy."),
        ("1", "A fault was named."),
        ("2", "Wrong usage."),
        ("130, 143", "Ended by Ctrl-C or SIGTERM."),
    ]
    return _text([*lines, *_tail(status, "mingle-discover", VARIABLES)])


def run_page() -> str:
    """Return the page of ``mingle-run``."""
    usage = "\\fB\\-\\-nnodes\\fR \\fIN\\fR [\\fIOPTION\\fR]... \\-\\- \\fICOMMAND\\fR [\\fIARGUMENT\\fR]..."
    lines = [*_head("mingle-run", run, usage), ".SH OPTIONS", *_definitions(_options(run))]
    lines += [".SH EXAMPLE", *_lines((run.epilog or "").removeprefix("Example: "))]
    status = [
        ("0", "The command has succeeded."),
        ("1", "The machines have not found each other, or another machine has failed and the command has not."),
        ("2", "Wrong usage."),
        ("other", "The status of the command; 128 and the signal's number if a signal has ended it."),
    ]
    variables = {name: text for name, text in VARIABLES.items() if name not in {"MINGLE_RANK", "MINGLE_WORLD_SIZE"}}
    variables["MINGLE_MESH"] = variables["MINGLE_MESH"].replace(f"default {DEFAULT_MESH}", f"default {MESH}")
    return _text([*lines, *_tail(status, "mingle-discover", variables)])


def _head(name: str, command: click.Command, usage: str) -> list[str]:
    summary, _, rest = (command.help or "").partition("\n\n")
    return [
        f'.TH {name.upper()} 1 "" mingle "User Commands"',
        *(".SH NAME", _escaped(f"{name} - ") + _escaped(summary.rstrip("."))),
        *(".SH SYNOPSIS", f".B {_escaped(name)}", usage),
        *(".SH DESCRIPTION", *_paragraphs(rest)),
    ]


def _tail(status: Iterable[tuple[str, str]], other: str, variables: Mapping[str, str]) -> Iterator[str]:
    yield from (".SH ENVIRONMENT", *_definitions(variables.items()))
    yield from (".SH EXIT STATUS", *_definitions(status))
    yield from (".SH SEE ALSO", f".BR {_escaped(other)} (1)")


def _options(command: click.Command) -> Iterator[tuple[str, str]]:
    """Yield each option as it is typed, with its help."""
    context = click.Context(command, help_option_names=["-h", "--help"])
    for option in command.get_params(context):
        if isinstance(option, click.Option):
            value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
            default = f" Default: {option.default:g}." if option.show_default else ""
            yield ", ".join(option.opts) + value, (option.help or "") + default


def _definitions(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in items:
        yield from (".TP", f"\\fB{_escaped(term)}\\fR", *_lines(text))


def _paragraphs(text: str | None) -> Iterator[str]:
    for paragraph in re.split(r"\n{2,}", (text or "").strip()):
        yield from (".PP", *_lines(" ".join(paragraph.split())))


def _lines(text: str) -> Iterator[str]:
    r"""Yield a text in roff: code in bold, and no line that begins with a control character."""
    for line in text.splitlines():
        yield re.sub(r"`([^`]*)`", r"\\fB\1\\fR", _escaped(line))


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page, text in pages().items():
        (FOLDER / page).write_text(text, encoding="utf-8")
