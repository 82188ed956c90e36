"""``mingle-discover interfaces`` and ``env``: what a rank started here would work with. No packet is sent."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from mingle.cli import output
from mingle.cli.options import FAILED, HELP, Shared, shared_options
from mingle.cli.output import Sheet
from mingle.errors import InterfaceError, MingleError

if TYPE_CHECKING:
    from rich.text import Text

    from mingle.config.settings import Network
    from mingle.network.interfaces import Interface

_STANDARD = {
    "RANK": "this process's rank, where no launcher and no MINGLE_RANK says it",
    "WORLD_SIZE": "the number of ranks, likewise",
    "LOCAL_RANK": "this process's rank on its node",
    "LOCAL_WORLD_SIZE": "the number of ranks on this node",
    "NODE_RANK": "this node's rank among the nodes",
    "GROUP_RANK": "torchrun's name for NODE_RANK",
    "MASTER_ADDR": "rank 0's address: mingle replaces it by the one it finds",
    "MASTER_PORT": "rank 0's port: likewise",
    "GLOO_SOCKET_IFNAME": "Gloo's interface; an exact name is mingle's, too, where MINGLE_INTERFACE is unset",
    "TP_SOCKET_IFNAME": "TensorPipe's interface: stays as it is",
    "NCCL_SOCKET_IFNAME": "NCCL's interfaces: stay as they are",
}
_SECRET = "MINGLE_SECRET"  # noqa: S105 - the variable's name
_HIDDEN = "(set, not shown)"
_PLACE = ("MINGLE_RANK", "MINGLE_WORLD_SIZE", "RANK", "WORLD_SIZE")


@click.command("interfaces", context_settings=HELP)
@shared_options
def interfaces_command(shared: Shared) -> None:
    """Show every network interface, which ones are used, best first, and why the others are not."""
    from mingle.network import interfaces

    network = shared.network(1.0)
    found = interfaces.scan()
    problem: InterfaceError | None = None
    used: tuple[Interface, ...] = ()
    reasons: dict[str, str] = {}
    try:
        choice = interfaces.choose(found, named=network.interfaces, family=network.family)
    except InterfaceError as error:
        problem = error
    else:
        used = choice.usable
        reasons = {interface.name: reason for interface, reason in choice.skipped}
    names = [interface.name for interface in used]
    ordered = [*used, *(each for each in found if each.name not in names)]
    records = [_interface_record(each, names, reasons.get(each.name)) for each in ordered]
    if shared.json:
        fields: dict[str, Any] = {
            "named": list(network.interfaces),
            "named_by": _named_by(network),
        }
        if problem is not None:
            fields["error"] = output.error_record(problem)
        output.answer_json("interfaces", {**fields, "interfaces": records})
    else:
        output.show(lambda: interfaces_sheet(records, wide=shared.wide), map(_interface_row, records))
    if problem is not None:
        output.say(f"mingle-discover interfaces: {problem}")
        click.get_current_context().exit(FAILED)


def _named_by(network: Network) -> str | None:
    """Returns the option or the variable that named the interfaces."""
    named_by = "--interface" if network.interfaces_from == "interface=" else network.interfaces_from
    return named_by or None


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


def interfaces_sheet(records: Iterable[dict[str, Any]], *, wide: bool) -> Sheet:
    """Return the table for a terminal, with each address on its own line."""
    rows: list[list[str | Text]] = [
        [*_interface_row(record)[:-1], output.stacked(record["addresses"])] for record in records
    ]
    return Sheet(("INTERFACE", "USED", "KIND", "STATE", "ADDRESSES"), rows, prose="USED", wide=wide)


def _interface_row(record: dict[str, Any]) -> tuple[str, ...]:
    state = "up" if record["up"] else "down"
    if record["up"] and not record["running"]:
        state += ", no carrier"
    if not record["multicast"]:
        state += ", no multicast flag"
    used = f"{record['preference']}." if record["used"] else f"no: {record['reason'] or 'nothing can be used'}"
    return record["name"], used, record["kind"], state, ", ".join(record["addresses"]) or "-"


@click.command("env", context_settings=HELP)
@shared_options
def env_command(shared: Shared) -> None:
    """Show the launcher detected, the variables read and their meaning, and what conflicts.

    The exit status is 1 when a rank started in this environment would fail.
    """
    from mingle.config import launchers, settings

    environ = os.environ
    variables = _variables(environ)
    seen: list[dict[str, Any]] = [
        {"name": row.name, "variables": row.variables_seen(environ)}
        for row in launchers.LAUNCHERS
        if row.is_seen(environ)
    ]
    resolved, conflicts = _resolve(shared, environ)
    unknown = [settings.unknown_variable_text(*item) for item in settings.unknown_variables(environ).items()]
    if shared.json:
        output.answer_json(
            "env",
            {
                "launchers": seen,
                "variables": variables,
                "resolved": resolved,
                "warnings": unknown,
                "conflicts": [output.error_record(error) for error in conflicts],
            },
        )
    else:
        rows = [(each["name"], each["value"] or "", each["meaning"]) for each in variables]
        for launcher in seen:
            rows += [(name, value, f"set by {launcher['name']}") for name, value in launcher["variables"].items()]
        rows += [
            (f"= {name}", "-" if value is None else str(value), "what mingle makes of it")
            for name, value in resolved.items()
        ]
        output.show(lambda: Sheet(("NAME", "VALUE", "MEANING"), rows, prose="MEANING", wide=shared.wide), rows)
        for warning in unknown:
            output.say(f"warning: {warning}")
        for error in conflicts:
            output.say(f"conflict: {error}")
    if conflicts:
        click.get_current_context().exit(FAILED)


def _variables(environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the variables that are set, with their meanings; a secret's value is not among them."""
    from mingle.config.settings import VARIABLES

    meanings = {**VARIABLES, **_STANDARD}
    return [
        {"name": name, "value": _HIDDEN if name == _SECRET else environ[name], "meaning": meaning}
        for name, meaning in meanings.items()
        if name in environ
    ]


def _resolve(shared: Shared, environ: Mapping[str, str]) -> tuple[dict[str, Any], list[MingleError]]:
    """Returns what mingle makes of the environment, and the errors that a rank started in it would raise."""
    from mingle.config import launchers, settings
    from mingle.config.placement import place

    resolved: dict[str, Any] = {"launcher": None, "job_id": None, "rank": None, "world_size": None}
    conflicts: list[MingleError] = []
    launched = any(row.is_seen(environ) for row in launchers.LAUNCHERS)
    # A shell that says nothing of ranks is no conflict: the arguments may say it all.
    if launched or any(environ.get(name, "").strip() for name in _PLACE):
        try:
            placement = place(environ)
        except MingleError as error:
            conflicts.append(error)
        else:
            resolved.update(
                launcher=placement.launcher,
                job_id=placement.job_id,
                rank=placement.rank,
                world_size=placement.world_size,
            )
    try:
        settings.store_port(environ, launcher=resolved["launcher"])
    except MingleError as error:
        conflicts.append(error)
    try:
        if "MINGLE_JOB_ID" in environ:
            resolved["job_id"] = settings.check_job_id(environ["MINGLE_JOB_ID"], "MINGLE_JOB_ID")
        resolved.update(_network_record(shared.network()))
    except MingleError as error:
        conflicts.append(error)
    return resolved, conflicts


def _network_record(network: Network) -> dict[str, Any]:
    from msgspec import structs

    record = structs.asdict(network)
    return {
        **{name: record[name] for name in ("discovery_timeout", "port", "ttl", "family", "advertise", "progress")},
        "interfaces": ", ".join(network.interfaces) or None,
        "interfaces_from": _named_by(network),
        "peers": ", ".join(map(str, network.peers)) or None,
        "secret": _HIDDEN if network.secret is not None else None,
    }
