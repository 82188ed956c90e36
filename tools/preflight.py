#!/usr/bin/env python3
"""Check, before pip downloads anything, that what mingle compiles can be compiled here.

One dependency, netifaces, has no wheels for Python 3.10 or newer, so pip compiles it. That takes a C compiler and
Python's headers; without them pip fails after it has downloaded torch, with a page of messages. netifaces-plus, a fork
with the same module, has wheels. Usage::

    python3 tools/preflight.py && python3 -m pip install .

An installed netifaces, or a wheel of it in the folders of PIP_FIND_LINKS, does as well. The exit
status is 0 if the installation can start, else 1.

make and the Dockerfile install netifaces-plus where netifaces cannot be had, and call the script with an option:

``--venv``
    for a fresh virtual environment, which does not see what this Python has installed; netifaces-plus does as well
``--needs [EXTRA …]``
    print what mingle and these extras require, one requirement per line. If netifaces-plus is among them,
    ``multicast_expert`` is not: it and mingle, which require netifaces by name, need pip's option ``--no-deps``
``--wheels``
    for `make wheels`: only a compiler does, or a wheel

The script needs no package, and runs on Pythons that are too old for mingle, to say so.
"""

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
# Those for which netifaces-plus 0.12 has wheels.
PLUS_PYTHONS = ((3, 10), (3, 14))
PLUS_MACHINES = ("x86_64", "aarch64", "arm64")


def main(arguments):
    """Print what is missing, if anything, and return the exit status."""
    if "--needs" in arguments:
        sys.stdout.writelines(f"{line}\n" for line in needs(arguments[arguments.index("--needs") + 1 :]))
        return 0
    fresh = bool({"--venv", "--wheels"} & set(arguments))
    found = [old_python()]
    if found == [None]:
        found.append(None if fresh else managed_by_the_system())
        if not netifaces_is_there(fresh) and not ("--venv" in arguments and plus_has_wheels()):
            found.append(no_compiler() if fresh else or_plus(no_compiler()))
    problems = list(filter(None, found))
    for observation, cause, ways in problems:
        lines = [observation, f"  likely cause: {cause}", "  fix, one of:"]
        lines += [f"    {system:<16}{command}" for system, command in ways]
        sys.stderr.write("\n".join(lines) + "\n")
    return 1 if problems else 0


def needs(extras):
    """Return the requirements of mingle and these extras, such that pip compiles nothing where it cannot."""
    try:
        import tomllib
    except ImportError:  # Python 3.10, where pip brings its own
        from pip._vendor import tomli as tomllib
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [*project["dependencies"]]
    own = re.compile(re.escape(project["name"]) + r"\[([\w,]+)\]")

    def add(extra, outer):
        for line in project["optional-dependencies"][extra]:
            requirement, _, marker = line.partition(";")
            markers = [*outer, *([f"({marker.strip()})"] if marker else [])]
            others = own.fullmatch(requirement.strip())
            if others is None:
                found.append("; ".join(filter(None, (requirement, " and ".join(markers)))))
            else:
                for other in others[1].split(","):
                    add(other, markers)

    for extra in extras:
        add(extra, [])
    if netifaces_is_there() or not plus_has_wheels() or not no_compiler():
        return found
    # typing-extensions is the other need of multicast_expert.
    instead = {"netifaces": "netifaces-plus", "multicast-expert": "typing-extensions"}
    return [instead.get(re.match(r"[\w-]+", line)[0], line) for line in found]


def plus_has_wheels():
    """Return whether netifaces-plus has wheels for a Python like this one."""
    oldest, newest = PLUS_PYTHONS
    usual = platform.python_implementation() == "CPython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    return usual and oldest <= sys.version_info[:2] <= newest and platform.machine() in PLUS_MACHINES


def old_python():
    """Return the problem that this Python is too old, or None."""
    if sys.version_info >= OLDEST:
        return None
    return (
        f"{sys.executable} is Python {platform.python_version()}, and mingle needs {OLDEST[0]}.{OLDEST[1]} or newer",
        "python3 is the system's own Python",
        [
            ("another one:", "python3.12 tools/preflight.py && python3.12 -m pip install ."),
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


def netifaces_is_there(fresh=False):
    """Return whether pip finds netifaces without compiling it; the module can be that of netifaces-plus."""
    if not fresh and netifaces_is_installed():
        return True
    folders = map(Path, os.environ.get("PIP_FIND_LINKS", "").split())
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return any(any(folder.glob(f"netifaces-*-{tag}-{tag}-*.whl")) for folder in folders)


def netifaces_is_installed():
    """Return whether this Python has the distribution netifaces."""
    from importlib import metadata  # not in the Pythons that are too old

    try:
        metadata.distribution("netifaces")
    except metadata.PackageNotFoundError:
        return False
    return True


def no_compiler():
    """Return the problem that a C file with Python.h cannot be compiled, or None."""
    told = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    wanted = "netifaces, a dependency of mingle, comes as source only"
    # A Python from elsewhere may name the compiler of the machine that it was built on.
    compiler = next(filter(shutil.which, (told, "cc", "gcc", "clang")), None)
    if compiler is None:
        return (
            f"{wanted}, and there is no C compiler here ({told})",
            "no development packages are installed",
            fixes(),
        )
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
    return (
        f"{wanted}, and the header {missing[1]} is missing",
        f"the headers of {owner} are not installed",
        fixes(),
    )


def or_plus(problem):
    """Return the problem, if there is one, with the way that pip has without a compiler in front of the others."""
    if problem is None or not plus_has_wheels():
        return problem
    lines = [
        ("no compiler:", "python3 -m pip install netifaces-plus torch click msgspec rich"),
        ("", "python3 -m pip install --no-deps multicast_expert ."),
    ]
    return (*problem[:2], lines + problem[2])


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
        "any": ("any:", "wheels that `make wheels` made on a machine like this one: export PIP_FIND_LINKS=wheelhouse"),
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
