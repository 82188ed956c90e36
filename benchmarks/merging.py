"""``python -m benchmarks.merging``: how long ranks that have begun apart need until they are one job.

Every host is cut off from every other one while its rank starts. The ranks are assigned, so after a while each hosts a
session of its own. Then the network is whole again, and all but one of these sessions end. Measured until the last rank
has GO. Needs root, as the lab does.
"""

from __future__ import annotations

import argparse
import statistics
import time

from tests.lab import Host, Lab

from benchmarks import assigned_ranks

SIZES = (2, 4, 16)
APART_SECONDS = 8.0
"""How long the ranks are alone: far longer than one waits before it hosts."""


def measure(lab: Lab, hosts: list[Host], number: int) -> float:
    """Return the seconds from the end of the split until the last rank has GO."""
    (network,) = lab.networks
    lab.split(network, *([host] for host in hosts))
    ranks = [host.start(assigned_ranks.discover, f"merge {number}", len(hosts)) for host in hosts]
    try:
        for each in ranks:
            each.wait_for("waiting", assigned_ranks.TIMEOUT)
        time.sleep(APART_SECONDS)
        joined = time.monotonic()
        lab.join(network)
        return max(float(each.wait_for("done", assigned_ranks.TIMEOUT)["at"]) for each in ranks) - joined
    finally:
        for each in ranks:
            each.kill()
            each.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merging", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("sizes", nargs="*", type=int, default=SIZES, metavar="HOSTS")
    chosen = parser.parse_args()
    for size in chosen.sizes:
        with Lab() as lab:
            network = lab.network()
            hosts = [lab.host(network) for _ in range(size)]
            took = [measure(lab, hosts, number) for number in range(chosen.rounds)]
        shown = ", ".join(f"{each:.2f}" for each in sorted(took))
        print(f"{size} hosts: median {statistics.median(took):.2f} s ({shown})", flush=True)


if __name__ == "__main__":
    main()
