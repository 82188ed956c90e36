"""``mingle-discover interfaces`` and ``env``: what a rank started here would work with. They send no packet."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click
from msgspec import structs

from mingle.cli import output
from mingle.cli.options import Shared, fail, shared_options
from mingle.cli.output import Table
from mingle.config import launchers, settings
from mingle.config.placement import asked_node_rank, resolve_placement
from mingle.config.settings import Setting
from mingle.errors import InterfaceError, MingleError
from mingle.network import interfaces as nics
from mingle.network.interfaces import Interface

_STANDARD = {
    "RANK": ("Job", "rank of this process, if no launcher and no MINGLE_RANK gives it"),
    "WORLD_SIZE": ("Job", "number of ranks, if no launcher and no MINGLE_WORLD_SIZE gives it"),
    "LOCAL_RANK": ("Job", "rank of this process on its node"),
    "LOCAL_WORLD_SIZE": ("Job", "number of ranks on this node"),
    "NODE_RANK": ("Job", "rank of this node among the nodes"),
    "GROUP_RANK": ("Job", "torchrun's name for NODE_RANK"),
    "MASTER_ADDR": ("torch", "address of rank 0; mingle replaces it with the one it finds"),
    "MASTER_PORT": ("torch", "port of rank 0; mingle replaces it with the one it finds"),
    "GLOO_SOCKET_IFNAME": ("torch", "Gloo's interface; mingle uses an exact name too if MINGLE_INTERFACE is unset"),
    "TP_SOCKET_IFNAME": ("torch", "TensorPipe's interface; mingle keeps it"),
    "NCCL_SOCKET_IFNAME": ("torch", "NCCL's interfaces; mingle keeps them"),
}


def _text(setting: Setting) -> str:
    return f"{setting.described} (default: {setting.default})"


_VARIABLES = {name: (each.section, _text(each)) for name, each in settings.VARIABLES.items()} | _STANDARD
"""The section and the meaning of each variable."""
_RESULTS = {
    "launcher": ("Launcher", "the launcher that these variables belong to"),
    **{
        name: (each.section, _text(each))
        for name, each in settings.SETTINGS.items()
        if name not in ("interface", "secret_file", "master_port", "mesh")
    },
    "node_rank_from": ("Job", "what gives that node rank"),
    "interfaces": ("Network", "the named interfaces; -: mingle chooses, see `mingle-discover interfaces`"),
    "interfaces_from": ("Network", "the option or variable that names them"),
}
"""The same of each result."""
_SECRET = "MINGLE_SECRET"  # noqa: S105 - the variable's name
_HIDDEN = "(set, not shown)"
_PASSWORD = re.compile(r"(?<=[^/:,\s]:)(?!//)[^@,\s]*(?=@)")
"""A password in a URL. No peer may have one, and an error says so without showing it."""
_PLACE = ("MINGLE_RANK", "MINGLE_WORLD_SIZE", "RANK", "WORLD_SIZE")


@click.command("interfaces", epilog="Example: mingle-discover interfaces --family 4")
@shared_options(timeout="Accepted as in every command; this one does not wait.", table=True)
def interfaces(shared: Shared) -> None:
    """Show the network interfaces, and which of them are used.

    The used ones come first, best first; the others are shown with the reason why they are not used.
    """
    network = shared.network(1.0)
    found = nics.scan()
    fields: dict[str, Any] = {"named": list(network.interfaces), "named_by": network.interfaces_from or None}
    problem: InterfaceError | None = None
    used: tuple[Interface, ...] = ()
    reasons: dict[str, str] = {}
    try:
        choice = nics.choose(
            found,
            named=network.interfaces,
            named_by=network.interfaces_from,
            family=network.family,
            files=nics.file_limit(),
        )
        used, reasons = choice.usable, {interface.name: reason for interface, reason in choice.skipped}
    except InterfaceError as error:
        problem = error
        fields["error"] = output.error_record(error)
    names = [interface.name for interface in used]
    ordered = [*used, *(each for each in found if each.name not in names)]
    records = [_interface_record(each, names, reasons.get(each.name)) for each in ordered]
    shared.answer({**fields, "interfaces": records}, interfaces_table(records, wide=shared.wide))
    if problem is not None:
        output.say(f"mingle-discover interfaces: {problem}")
        fail()


def _interface_record(interface: Interface, used: list[str], reason: str | None) -> dict[str, Any]:
    return {
        "name": interface.name,
        "index": interface.index,
        "addresses": [str(address) for address in interface.addresses],
        "kind": interface.kind.name.lower(),
        "up": interface.up,
        "running": interface.running,
        "multicast": interface.multicast,
        "used": interface.name in used,
        "preference": used.index(interface.name) + 1 if interface.name in used else None,
        "reason": reason,
    }


def interfaces_table(records: Iterable[Mapping[str, Any]], *, wide: bool = False) -> Table:
    """Return the table of these records."""
    rows = []
    for each in records:
        state = "up" if each["up"] else "down"
        state += ", no carrier" if each["up"] and not each["running"] else ""
        state += "" if each["multicast"] else ", no multicast flag"
        choice = "preferred" if each["preference"] == 1 else f"choice {each['preference']}"
        used = f"yes, {choice}" if each["used"] else f"no: {each['reason'] or 'nothing can be used'}"
        rows.append((each["name"], used, each["kind"], state, tuple(each["addresses"])))
    return Table(("INTERFACE", "USED", "KIND", "STATE", "ADDRESSES"), rows, prose="USED", wide=wide)


@click.command("env", epilog="Example: srun mingle-discover env")
@shared_options(
    timeout=f"Time limit that a rank would have. Default: MINGLE_TIMEOUT, else {settings.DEFAULT_DISCOVERY_TIMEOUT:g}.",
    table=True,
)
def env(shared: Shared) -> None:
    """Show what a rank started in this environment would read.

    It has four sections: the launcher, the job, the network and torch. In each, names in lower case are what a rank
    would use, and names in capitals are the variables that are set. Warnings and conflicts follow on stderr. The exit
    status is 1 if such a rank would fail.
    """
    environ = os.environ
    variables = [
        {"name": name, "value": _shown(name, environ[name]), "meaning": meaning}
        for name, (_, meaning) in _VARIABLES.items()
        if name in environ
    ]
    seen: list[dict[str, Any]] = [
        {"name": each.name, "variables": each.variables_seen(environ)}
        for each in launchers.LAUNCHERS
        if each.is_seen(environ)
    ]
    resolved, conflicts = _resolve(shared, environ)
    unknown = [settings.unknown_variable_text(*item) for item in settings.unknown_variables(environ).items()]
    fields = {
        "launchers": seen,
        "variables": variables,
        "resolved": resolved,
        "warnings": unknown,
        "conflicts": [output.error_record(error) for error in conflicts],
    }
    shared.answer(fields, env_table(resolved, variables, seen, wide=shared.wide))
    if not shared.json:
        for line in (*(f"warning: {each}" for each in unknown), *(f"conflict: {error}" for error in conflicts)):
            output.say(line)
    if conflicts:
        fail()


def env_table(
    resolved: Mapping[str, Any],
    variables: Iterable[Mapping[str, str]],
    seen: Iterable[Mapping[str, Any]],
    *,
    wide: bool = False,
) -> Table:
    """Return the table of sections: in each what a rank would use, then the variables that are set."""
    rows: dict[str, list[tuple[str, str, str, str]]] = {
        section: [] for section in ("Launcher", "Job", "Network", "torch")
    }
    for name, (section, meaning) in _RESULTS.items():
        value = resolved.get(name)
        text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        rows[section].append((section, name, text, meaning))
    for each in variables:
        section = _VARIABLES[each["name"]][0]
        rows[section].append((section, each["name"], each["value"], each["meaning"]))
    for launcher in seen:
        for name, value in launcher["variables"].items():
            rows["Launcher"].append(("Launcher", name, value, f"set by {launcher['name']}"))
    shown = [part for part in rows.values() if part]
    return Table(
        ("SECTION", "NAME", "VALUE", "MEANING"),
        [row for part in shown for row in part],
        prose="MEANING",
        wide=wide,
        groups=[len(part) for part in shown],
    )


def _shown(name: str, value: str) -> str:
    """Return a variable's value without what must stay secret."""
    return _HIDDEN if name == _SECRET else _PASSWORD.sub("***", value)


def _resolve(shared: Shared, environ: Mapping[str, str]) -> tuple[dict[str, Any], list[MingleError]]:
    """Return what mingle makes of the environment, and the errors that a rank started in it would raise."""
    resolved: dict[str, Any] = dict.fromkeys(
        ("launcher", "job_id", "rank", "world_size", "node_rank", "node_rank_from")
    )
    conflicts: list[MingleError] = []

    @contextlib.contextmanager
    def noting_conflict() -> Iterator[None]:
        try:
            yield
        except MingleError as error:
            conflicts.append(error)

    launched = any(each.is_seen(environ) for each in launchers.LAUNCHERS)
    # A shell without a rank is not a conflict: the arguments can give everything.
    if launched or any(environ.get(name, "").strip() for name in _PLACE):
        with noting_conflict():
            placement = resolve_placement(environ)
            resolved = {name: getattr(placement, name) for name in resolved}
            resolved["node_rank_from"] = placement.node_rank_from or None
    with noting_conflict():
        # What is started once on each node, such as torchrun, has no rank, and a node rank all the same.
        if resolved["node_rank"] is None and (asked := asked_node_rank(environ, torchrun=True)) is not None:
            resolved |= {"node_rank": asked.value, "node_rank_from": asked.source}
    with noting_conflict():
        settings.resolve_store_port(environ, shared.arguments, launcher=resolved["launcher"])
    with noting_conflict():
        settings.resolve_mesh(environ, shared.arguments)
    with noting_conflict():
        if "MINGLE_JOB_ID" in environ:
            resolved["job_id"] = settings.check_job_id(environ["MINGLE_JOB_ID"], "MINGLE_JOB_ID")
            settings.refuse_backend(resolved["job_id"], "MINGLE_JOB_ID")
        elif resolved["job_id"] is not None:
            settings.check_job_id(resolved["job_id"], f"{resolved['launcher']}'s id")
    with noting_conflict():
        network = shared.network()
        resolved |= {
            **{name: value for name, value in structs.asdict(network).items() if name in _RESULTS},
            "interfaces": ", ".join(network.interfaces) or None,
            "interfaces_from": network.interfaces_from or None,
            "peers": ", ".join((*map(str, network.peers), *network.folders)) or None,
            "secret": _HIDDEN if network.secret is not None else None,
        }
    return resolved, conflicts
