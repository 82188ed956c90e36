"""``mingle-discover announce``: speak for a job whose address somebody knows."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

import click

from mingle.cli import output
from mingle.cli.options import HELP, Shared, shared_options
from mingle.errors import ConfigurationError

MAX_ADDRESS_LENGTH = 64


@click.command("announce", context_settings=HELP)
@click.argument("job")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    required=True,
    metavar="PORT",
    help="The port to announce.",
)
@click.option(
    "--master-addr",
    metavar="ADDRESS",
    help="The address or host name to announce. Default: the address at which each asker reaches this host.",
)
@click.option("--world-size", type=click.IntRange(1, 1_000_000), metavar="N", help="How many ranks there are.")
@shared_options
def announce(shared: Shared, job: str, master_port: int, master_addr: str | None, world_size: int | None) -> None:
    """Play JOB's host without torch: `find` and `list` see it, ranks report it and never join it.

    It goes on until Ctrl-C, SIGTERM or, if --timeout is given, for so many seconds.
    """
    import time

    from mingle.config import settings
    from mingle.observe.announcing import Announced, Announcement
    from mingle.observe.observer import Observer, new_name, this_process
    from mingle.observe.sighting import endpoint_text
    from mingle.wire.authentication import JobKey

    job = settings.check_job_id(job, "JOB")
    network = shared.network(1.0)
    if master_addr is not None:
        _check_address(master_addr)
    key = None if network.secret is None else JobKey(network.secret, job)
    signal.signal(signal.SIGTERM, _terminate)
    with Observer(network, job, key) as observer:
        addresses, port = observer.listen()
        now = time.monotonic()
        announcement = Announcement(
            Announced(job=job, master_addr=master_addr or "", master_port=master_port, world_size=world_size),
            session=new_name(),
            member=new_name(),
            who=this_process(),
            addresses=addresses,
            port=port,
            key=key,
            rng=observer.rng,
            now=now,
        )
        shown = master_addr or addresses[0]
        if shared.json:
            fields = {
                "job": job,
                "session": announcement.session.hex(),
                "address": shown,
                "port": master_port,
                "world_size": world_size,
                "control_addresses": addresses,
                "control_port": port,
            }
            output.answer_json("announce", fields)
        else:
            output.answer(endpoint_text(shown, master_port))
        output.say(f"announcing job {job!r} until interrupted (Ctrl-C)")
        observer.run(announcement, until=None if shared.timeout is None else now + shared.timeout)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    # By an exception, so that the observer says good-bye before the process ends.
    sys.exit(128 + number)


def _check_address(text: str) -> None:
    """Makes sure that an address can be announced.

    Raises:
        ConfigurationError: it is no address and no host name, or too long.
    """
    from mingle.observe.sighting import is_host

    if not text or not is_host(text) or len(text) > MAX_ADDRESS_LENGTH:
        raise ConfigurationError.explain(
            f"--master-addr={text!r} can't be announced",
            cause=f"a URL, an address with a port or a zone, or a name of more than {MAX_ADDRESS_LENGTH} characters",
            remedy="give an IP address or a host name, or leave it out to announce this host's own address.",
        )
