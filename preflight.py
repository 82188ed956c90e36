#!/usr/bin/env python3
"""Check, before pip downloads anything, that what mingle compiles can be compiled here.

One dependency, netifaces, has no wheels for Python 3.10 or newer, so pip compiles it. That takes a C compiler and
Python's headers; without them pip fails after it has downloaded torch, with a page of messages. Usage::

    python3 preflight.py && python3 -m pip install .

An installed netifaces, or a wheel of it in wheelhouse/ or in the folders of PIP_FIND_LINKS, does as well. With
``--venv`` only a wheel does: a fresh virtual environment does not see what this Python has installed. The exit status
is 0 if the installation can start, else 1.

The script needs no package, and runs on Pythons that are too old for mingle, to say so.
"""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

OLDEST = (3, 10)


def main(arguments):
    """Print what is missing, if anything, and return the exit status."""
    fresh = "--venv" in arguments
    found = [old_python()]
    if found == [None]:
        found += [None if fresh else managed_by_the_system(), None if netifaces_is_there(fresh) else no_compiler()]
    problems = list(filter(None, found))
    for observation, cause, ways in problems:
        lines = [observation, f"  likely cause: {cause}", "  fix, one of:"]
        lines += [f"    {system:<16}{command}" for system, command in ways]
        sys.stderr.write("\n".join(lines) + "\n")
    return 1 if problems else 0


def old_python():
    """Return the problem that this Python is too old, or None."""
    if sys.version_info >= OLDEST:
        return None
    return (
        f"{sys.executable} is Python {platform.python_version()}, and mingle needs {OLDEST[0]}.{OLDEST[1]} or newer",
        "python3 is the system's own Python",
        [
            ("another one:", "python3.12 preflight.py && python3.12 -m pip install ."),
            ("with make:", "make PYTHON=python3.12 demo"),
        ],
    )


def managed_by_the_system():
    """Return the problem that pip refuses to install into this Python (PEP 668), or None."""
    if sys.prefix != sys.base_prefix or not Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists():
        return None
    ways = [
        ("in a venv:", "python3 -m venv .venv && . .venv/bin/activate, then the same line again"),
        ("without venv:", "on Debian and Ubuntu first: apt-get install python3-venv"),
    ]
    return f"pip installs nothing into {sys.executable}", "this Python belongs to the system's package manager", ways


def netifaces_is_there(fresh):
    """Return whether pip finds netifaces without compiling it."""
    if not fresh and importlib.util.find_spec("netifaces") is not None:
        return True
    folders = [Path(__file__).parent / "wheelhouse", *map(Path, os.environ.get("PIP_FIND_LINKS", "").split())]
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return any(any(folder.glob(f"netifaces-*-{tag}-{tag}-*.whl")) for folder in folders)


def no_compiler():
    """Return the problem that a C file with Python.h cannot be compiled, or None."""
    told = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    wanted = "netifaces, a dependency of mingle, comes as source only"
    # A Python from elsewhere may name the compiler of the machine that it was built on.
    compiler = next(filter(shutil.which, (told, "cc", "gcc", "clang")), None)
    if compiler is None:
        return f"{wanted}, and there is no C compiler here ({told})", "no development packages are installed", fixes()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("#include <Python.h>\n")
        headers = sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})
        command = [compiler, *(f"-I{path}" for path in headers), "-c", str(source), "-o", f"{source}.o"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode == 0:
        return None
    said = done.stdout.decode(errors="replace").strip()
    missing = re.search(r"fatal error: '?([\w./]+\.h)'?", said)
    if missing is None:
        return f"{wanted}, and {compiler} fails: {said}", "the compiler is not set up", fixes()
    owner = "Python" if missing[1] == "Python.h" else "the C library"
    return f"{wanted}, and the header {missing[1]} is missing", f"the headers of {owner} are not installed", fixes()


def fixes():
    """Return the commands that help, by system, with this machine's system first."""
    # Distributions name the headers of their own Python python3-dev, and those of another one after its version.
    own = os.path.realpath("/usr/bin/python3") == os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    python = "python3" if own else f"python{sys.version_info[0]}.{sys.version_info[1]}"
    ways = {
        "debian": ("Debian, Ubuntu:", f"apt-get install gcc libc6-dev {python}-dev"),
        "debian, without a compiler": ("", "apt-get install python3-netifaces, and a venv with --system-site-packages"),
        "fedora": ("Fedora, RHEL:", f"dnf install gcc {python}-devel"),
        "arch": ("Arch:", "pacman -S gcc"),
        "conda": ("conda:", "conda install -c conda-forge netifaces"),
        "any": ("any:", "wheels that `make wheels` made on a machine like this one, in wheelhouse/"),
    }
    if not own:
        del ways["debian, without a compiler"]
    here = "conda" if Path(sys.base_prefix, "conda-meta").is_dir() else family()
    return [ways[system] for system in sorted(ways, key=lambda system: not system.startswith(here or "-"))]


def family():
    """Return the family of this Linux distribution, as far as os-release tells, else an empty string."""
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return ""
    known = {"debian": "debian", "ubuntu": "debian", "fedora": "fedora", "rhel": "fedora", "arch": "arch"}
    words = " ".join(re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', text, re.MULTILINE)).split()
    return next((known[word] for word in words if word in known), "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
