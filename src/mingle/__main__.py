"""``python -m mingle``: the command ``mingle-discover`` where its script is not on the path."""

from __future__ import annotations

from mingle.cli import main

if __name__ == "__main__":
    main(prog_name="mingle-discover")
