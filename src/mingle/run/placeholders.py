"""The placeholders in a command's arguments, such as ``{master_addr}``.

A shell would expand ``$MASTER_ADDR`` before the machines have found each other.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mingle.config import values
from mingle.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAMES = (
    "master_addr",
    "master_port",
    "node_rank",
    "nnodes",
    "address",
    "interface",
    "my_port",
    "hosts",
    "hostports",
    "hostfile",
)

# ``{name}`` is a placeholder, and ``{{name}}`` stands for ``{name}``. Any other brace stands for itself: a shell's
# ``${name}``, ``{}``, ``{1}``, and JSON, in which a quote or a space follows the brace.
_BRACED = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|(?<!\$)\{([A-Za-z_]\w*)\}")


def fill(words: Sequence[str], known: Mapping[str, object]) -> list[str]:
    """Return the words of a command with its placeholders filled in.

    Raises:
        ConfigurationError: a placeholder is unknown.
    """

    def one(found: re.Match[str]) -> str:
        literal, name = found.groups()
        if literal is not None:
            return f"{{{literal}}}"
        if name not in known:
            raise _unknown(name)
        return str(known[name])

    return [_BRACED.sub(one, word) for word in words]


def check(words: Sequence[str]) -> None:
    """Check that every placeholder is known.

    Raises:
        ConfigurationError: one is not.
    """
    fill(words, dict.fromkeys(NAMES, ""))


def used_in(word: str) -> bool:
    """Return whether a word is another one after its placeholders are filled in."""
    return fill([word], dict.fromkeys(NAMES, "")) != [word]


def _unknown(name: str) -> ConfigurationError:
    meant = values.nearest(name.lower(), NAMES)
    hint = f"write {{{meant}}}" if meant else f"the placeholders are {', '.join(f'{{{each}}}' for each in NAMES)}"
    return ConfigurationError.explain(
        f"{{{name}}} in the command is not a placeholder.",
        cause="a mistyped name" if meant else "braces that are meant for the program itself",
        remedy=f"{hint}; for the text {{{name}}} itself write {{{{{name}}}}}.",
    )
