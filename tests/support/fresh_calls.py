"""What the first call of a function runs in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys


def files_run_by(call: str, *, after: str) -> set[str]:
    """Return the files whose functions run while a statement is executed; others are executed before it."""
    lines = [
        "import sys",
        after,
        "ran = set()",
        "sys.setprofile(lambda frame, event, _: ran.add(frame.f_code.co_filename))",
        call,
        "sys.setprofile(None)",
        "print(*sorted(ran), sep='\\n')",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())
