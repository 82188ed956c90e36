"""What is said of a mesh that does not hold: the error that names the nodes that can't reach each other. Pure.

It names the pattern and not each of the pairs: one node that nobody reaches is one line, also among 128 nodes.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec import Struct, structs

from mingle.diagnostics import Detour, firewall, route_through
from mingle.errors import FREE_DESCRIPTORS, ConnectivityError, counted
from mingle.protocol.links.prover import LOSSY
from mingle.protocol.session.mesh_proof import Node, Pair, Proof, targets_of
from mingle.text import few
from mingle.wire.frames import MAX_TEXT_CHARACTERS, Failure, ProcessInfo, Refused, Unreached

PAIR_LINES = 5
"""The most lines about pairs in an error."""
# Of a firewall that rejects, ICMP says that there is no route; one that drops what follows a SYN leaves silence.
_BY_A_RULE: Mapping[Unreached, bool] = {
    "no answer": False,
    "silent": False,
    "refused": True,
    "no route": True,
}
"""How a connection fails if a firewall's rule blocks it, and whether that rule rejects."""
_NAMED = 4
"""The most nodes that one line names."""


class _Text:
    """The sentences about one proof."""

    def __init__(self, proof: Proof, dialed_by: Mapping[int, set[int]] | None = None) -> None:
        self.proof = proof
        self.nodes = proof.nodes
        self.pairs = dict(sorted(proof.failures.items()))
        self.dialed_by = proof.dialers() if dialed_by is None else dialed_by
        names = [node.who.hostname for node in self.nodes]
        self._unique = len(set(names)) == len(names)

    def short(self, number: int) -> str:
        node = self.nodes[number]
        return node.who.hostname if self._unique and node.who.hostname else node.name

    def some(self, numbers: Iterable[int]) -> str:
        """Name the first few of these nodes."""
        return few((self.short(each) for each in sorted(numbers)), most=_NAMED)

    def how(self, pairs: Iterable[Pair]) -> str:
        """Say how connections failed: as most of them did."""
        failure = self.pairs[self._typical(pairs)]
        port = next(node.port for node in self.nodes if node.member == failure.member)
        detail = f" ({failure.detail})" if failure.detail else ""
        sentences: dict[Unreached, str] = {
            "refused": f"TCP port {port} refuses connections",
            "no answer": f"no answer from TCP port {port}{detail if failure.detail == LOSSY else ''}",
            "no route": f"no route{detail}",
            "another program": f"another program answers on TCP port {port}{detail}",
            "silent": f"TCP port {port} accepts connections and does not answer, though the process there runs",
            "closed": f"TCP port {port} accepts connections and closes them",
            "large packets": f"TCP port {port} is reached, but large packets do not pass",
            "no descriptor": "no file descriptor is free to connect",
        }
        return sentences[failure.how]

    def _typical(self, pairs: Iterable[Pair]) -> Pair:
        """Return the first of these pairs whose connections failed as most of them did."""
        every = list(pairs)
        kinds = Counter(self.pairs[each].how for each in every)
        return max(every, key=lambda each: kinds[self.pairs[each].how])

    # --- patterns --------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """Return the patterns in words, the widest first."""
        rest = dict(self.pairs)
        if len(self.nodes) > 2 and len(rest) == sum(map(len, self.dialed_by.values())):
            return [f"no node reaches any other one: {self.how(rest)}"]
        found = self._halves(rest) or [*self._alone(rest), *self._block(rest), *self._single(rest)]
        if len(found) > PAIR_LINES:
            found = [*found[: PAIR_LINES - 1], f"and {counted(len(found) - PAIR_LINES + 1, 'more such line')}"]
        return found

    def _groups(self) -> list[set[int]]:
        """Return the nodes that are connected by pairs that reach each other."""
        groups: list[set[int]] = []
        left = set(range(len(self.nodes)))
        while left:
            group, ahead = set(), [min(left)]
            while ahead:
                one = ahead.pop()
                if one in group:
                    continue
                group.add(one)
                ahead += [
                    other for other in left - group if (one, other) not in self.pairs and (other, one) not in self.pairs
                ]
            left -= group
            groups.append(group)
        return groups

    def _halves(self, rest: dict[Pair, Failure]) -> list[str]:
        if len(self.pairs) < 4 * (len(self.nodes) - 2):
            return []  # fewer than there are between a group of two and the others
        groups = self._groups()
        if len(groups) < 2 or min(map(len, groups)) < 2 or self.proof.sampled:
            return []
        across = [pair for pair in self.pairs if not any(set(pair) <= group for group in groups)]
        if not all(pair[::-1] in self.pairs for pair in across):
            return []  # one direction works
        rest.clear()
        described = " | ".join(self.some(group) for group in sorted(groups, key=min))
        line = f"{len(groups)} groups that reach only themselves: {described}: {self.how(across)}"
        return [line.replace("2 groups that reach", "two halves that reach")]

    def _alone(self, rest: dict[Pair, Failure]) -> list[str]:
        """Explain the pairs of the nodes that nobody reaches, or that reach nobody."""
        found = []
        if len(self.nodes) < 3:
            return []
        misses, missed = Counter(one for one, _ in rest), Counter(other for _, other in rest)
        for number, node in enumerate(self.nodes):
            if max(misses[number], missed[number]) < 2:
                continue
            dialers, targets = self.dialed_by.get(number, set()), set(self.proof.targets_of_node(number))
            into = [(each, number) for each in sorted(dialers)]
            out = [(number, each) for each in sorted(targets)]
            # At least two of the pairs are not explained yet.
            deaf, mute = (
                all(pair in self.pairs for pair in pairs) and sum(pair in rest for pair in pairs) > 1
                for pairs in (into, out)
            )
            if deaf and mute:
                found.append(f"{node.name} reaches no other node, and none reaches it: {self.how(into)}")
            elif deaf:
                found.append(f"no other node reaches {node.name}: {self.how(into)}")
            elif mute:
                found.append(f"{node.name} reaches no other node: {self.how(out)}")
            for pair in (into if deaf else []) + (out if mute else []):
                rest.pop(pair, None)
        return found

    def _block(self, rest: dict[Pair, Failure]) -> list[str]:
        """Explain pairs that are all those between two sets of nodes."""
        facing: dict[int, set[int]] = {}
        for one, other in rest:
            if (other, one) in rest:
                facing.setdefault(one, set()).add(other)
        for one, others in sorted(facing.items()):
            alike = {each for each, same in facing.items() if same == others} - others
            if one in alike and len(others) > 1 and len(alike) > 1:
                pairs = [(a, b) for a in alike for b in others]
                line = f"{self.some(alike)} and {self.some(others)} do not reach each other: {self.how(pairs)}"
                for a, b in pairs:
                    del rest[a, b], rest[b, a]
                return [line, *self._block(rest)]
        here, there = {one for one, _ in rest}, {other for _, other in rest}
        if len(here) < 2 or len(there) < 2 or here & there or len(rest) != len(here) * len(there):
            return []
        back = "; the other way works" if all(self._reaches(other, one) for one, other in rest) else ""
        line = f"none of {self.some(here)} reaches any of {self.some(there)}: {self.how(rest)}{back}"
        rest.clear()
        return [line]

    def _reaches(self, one: int, other: int) -> bool:
        """Return whether a node has dialed another one and reached it, whatever of that was said already."""
        failed = (one, other) in self.pairs or (one, other) in self.proof.unanswered
        return not failed and other in self.proof.targets_of_node(one)

    def _single(self, rest: dict[Pair, Failure]) -> list[str]:
        found = []
        for one, other in list(rest):
            if (one, other) not in rest:
                continue
            here, there = self.nodes[one].name, self.nodes[other].name
            first = self.how([(one, other)])
            if (other, one) in rest:
                second = self.how([(other, one)])
                how = first if first.split("port")[0] == second.split("port")[0] else f"{first}; back: {second}"
                found.append(f"{here} and {there} do not reach each other: {how}")
                del rest[other, one]
            elif self._reaches(other, one):
                found.append(f"{here} does not reach {there}: {first}; the other way works")
            else:
                found.append(f"{here} does not reach {there}: {first}")
            del rest[one, other]
        return found

    # --- cause and fix ---------------------------------------------------------------------------------------------

    def cause(self) -> tuple[str, str]:
        """Return the likely cause, and a fix as a command, for the pair that stands for most."""
        # What a machine has found is known, and the rest is guessed, whichever pair stands for most.
        for how, rejects in _BY_A_RULE.items():
            if found := self._found((pair for pair, one in self.pairs.items() if one.how == how), rejects=rejects):
                return found
        one, other = self._typical(self.pairs)
        kind, detail = self.pairs[one, other].how, self.pairs[one, other].detail
        dialing, dialed = self.nodes[one], self.nodes[other]
        here, there = self.short(one), self.short(other)
        proxied = next((node for node in self.nodes if node.proxied), None)
        if proxied is not None and kind not in ("no descriptor", "large packets"):
            return (
                f"a sidecar of a service mesh takes the connections (they come from {proxied.who.address}), and its "
                f"policy does not let {here} connect to {there}",
                "allow TCP on all ports between the pods of the job (Istio: an AuthorizationPolicy), or leave them out "
                'of the service mesh (sidecar.istio.io/inject: "false").',
            )
        allow = (
            f"let all TCP ports pass between {here} and {there}, as torch needs them; `mingle-discover ping` on both "
            f"shows whether it helps. As root this names the rule on {there}, if it is there: "
            f"`{firewall.LOOK_AS_ROOT}`"
        )
        if "EADDRNOTAVAIL" in detail:
            return (
                f"no port is free on {here} for a connection to leave from (net.ipv4.ip_local_port_range)",
                f"look on {here} with `ss -tuan` at what holds them, or widen the range.",
            )
        match kind:
            case "refused":
                return f"a firewall on {there}, or between it and {here}, rejects TCP connections", allow
            case "no answer" if detail == LOSSY:
                return (
                    f"the network between {here} and {there} loses many packets",
                    f"`mingle-discover ping` on {here} and {there} shows how many; look for a bad cable or port, or a "
                    "queue that is full (`ip -s link`).",
                )
            case "no answer":
                return f"a firewall on {there} or on {here}, or one between them, drops TCP connections", allow
            case "no route" if Detour.MARK in detail:
                return (
                    f"the kernel of {here} sends to {dialed.address} by another interface than {dialing.interface}, "
                    "or one without a carrier, and torch binds no address",
                    f"set the other interface down, or route each other node through {dialing.interface}, on {here} "
                    f"and likewise on the others: `{route_through(dialing.interface, dialed.address)}`",
                )
            case "no route":
                return (
                    f"a wrong netmask or route on {here}, or {there} is not on the network of {self.proof.network}",
                    f"compare `ip route get {dialed.address}` on {here} with `ip address` on {there}.",
                )
            case "large packets":
                return (
                    "a device between them drops packets that are larger than its MTU: a tunnel or a switch",
                    f"`ping -M do -s 1472 {dialed.address}` on {here} shows it; set the MTU that passes on all nodes, "
                    f"such as `sudo ip link set {dialing.interface or 'eth0'} mtu 1400`.",
                )
            case "another program" | "silent":
                dropped = ", or a firewall drops all but the first packets" if kind == "silent" else ""
                return (
                    f"{dialed.address} is also the address of another machine, or a proxy answers for it{dropped}",
                    f"`ip neigh show {dialed.address}` on {here} shows the hardware address that answers; give "
                    "each machine an address of its own.",
                )
            case "no descriptor":
                return f"the process on {here} has no file descriptor left", FREE_DESCRIPTORS
            case "closed":
                return (
                    f"the process on {there} has no file descriptor left, or a proxy between it and {here} closes "
                    "the connections",
                    f"on {there} {FREE_DESCRIPTORS}",
                )

    def _found(self, pairs: Iterable[Pair], *, rejects: bool) -> tuple[str, str] | None:
        """Return what a machine has found out about itself, as cause and fix, if that explains one of these pairs.

        Args:
            pairs: which failed in one way.
            rejects: whether they failed because something has answered.
        """
        ends = [end for one, other in pairs for end in ((other, one, False), (one, other, True))]
        for number, peer, outgoing in ends:
            blocked = self.proof.blocked.get(number)
            if (
                blocked is not None
                and (blocked.address, blocked.outgoing) == (self.nodes[peer].address, outgoing)
                and ("reject" in blocked.rule) == rejects
            ):
                where = self.short(number)
                what = f"rule `{blocked.rule}`" if blocked.rule else "the policy"
                direction = "to" if blocked.outgoing else "from"
                family, table, name = blocked.chain.split()
                block = firewall.Block(firewall.Chain(family, table, name), blocked.rule)
                networks = self._networks(blocked.address)
                fix = firewall.allow(
                    "tcp", 0, networks, manager=blocked.manager, block=block, outgoing=blocked.outgoing
                )
                return (
                    f"as {where} finds in its own firewall, {what} of chain {blocked.chain} blocks TCP connections "
                    f"{direction} {blocked.address}",
                    f"on {where} (torch needs all TCP ports): `{'; '.join(fix)}`",
                )
        return None

    def _networks(self, address: str) -> list[str]:
        """Return the network of the job, and a node that is outside of it, as behind a router."""
        network = ipaddress.ip_network(self.proof.subnet)
        inside = ipaddress.ip_address(address.partition("%")[0]) in network
        return [self.proof.subnet] if inside else [self.proof.subnet, address]


def describe(proof: Proof) -> tuple[str, list[str]]:
    """Return a heading, and the patterns of what fails, one a line."""
    text, total = _Text(proof), len(proof.nodes)
    others = f", nor on those of {', '.join(proof.others)}" if proof.others else ""
    sample = f" (sampled: each node has dialed {_dialed(total)} others)" if proof.sampled else ""
    heading = (
        f"its {total} nodes can't all open TCP connections to each other on the network of {proof.network}"
        f"{others}{sample}"
    )
    return heading, [each[:MAX_TEXT_CHARACTERS] for each in text.lines()]


def cause_of(proof: Proof) -> tuple[str, str]:
    """Return the likely cause and a fix."""
    return _Text(proof).cause()


def error(job: str, heading: str, lines: Sequence[str], cause: str, remedy: str) -> ConnectivityError:
    """Return the error that every rank raises."""
    observation = "\n".join([f"job {job!r}: {heading}:", *(f"  {line}" for line in lines)])
    return ConnectivityError.explain(observation, cause=cause, remedy=to_paste(remedy))


def to_paste(remedy: str) -> str:
    """Return a remedy with the commands at its end on lines of their own, which a frame has no room for."""
    words, quote, commands = remedy.removesuffix("`").rpartition(": `")
    is_last = quote and remedy.endswith("`") and "`" not in commands
    return "\n".join([f"{words}:", *commands.split("; ")]) if is_last else remedy


def warning(proof: Proof) -> str:
    """Return the warning of a job that forms all the same."""
    unit = proof.nodes[0].who.unit
    heading, lines = describe(proof)
    cause, remedy = cause_of(proof)
    return f"{heading}; the {unit}s start anyway (mesh=warn): {'; '.join(lines)}. Likely cause: {cause}. Fix: {remedy}"


class LeftOut(Struct, frozen=True):
    """A node that gets no seat, since it and members can't reach each other."""

    node: Node
    pairs: str
    """Which members these are, and how connections failed."""
    cause: str
    """The likely cause."""
    remedy: str
    """What to do about it."""

    def refusal(self, host: ProcessInfo) -> Refused:
        """Return what the node itself is told."""
        return Refused(
            reason="mesh", detail=_cut(self.pairs), who=host, cause=_cut(self.cause), remedy=_cut(self.remedy)
        )

    def __str__(self) -> str:
        """What everybody else is told."""
        return _cut(f"{self.node.name} gets no place: {self.pairs}. Likely cause: {self.cause}. Fix: {self.remedy}")


def _cut(text: str) -> str:
    return text[:MAX_TEXT_CHARACTERS]


def left_out(proof: Proof, host: bytes) -> list[LeftOut]:
    """Return the nodes that get no seat, so that all the others reach each other.

    Of two nodes that don't reach each other that one is left out which lacks more others, then the later one in order.
    The host never is: every member has reached it. So those that it lacks are left out first.
    """
    pairs_of: dict[int, set[Pair]] = {}
    for pair in proof.failures:
        for one in pair:
            pairs_of.setdefault(one, set()).add(pair)
    own = next((number for number, node in enumerate(proof.nodes) if node.member == host), -1)
    lacked_by_host = {one for pair in pairs_of.pop(own, ()) for one in pair}
    numbers = list[int]()
    while any(pairs_of.values()):
        number = max(pairs_of, key=lambda one: (one in lacked_by_host, len(pairs_of[one]), one))
        numbers.append(number)
        for one, other in pairs_of.pop(number):
            pairs_of.get(other if one == number else one, set()).discard((one, other))
    dialed_by = proof.dialers()
    return [without(proof, proof.nodes[number].member, dialed_by) for number in numbers]


def without(proof: Proof, member: bytes, dialed_by: Mapping[int, set[int]] | None = None) -> LeftOut:
    """Return why a node gets no seat.

    Args:
        proof: what is known of the mesh.
        member: of the node.
        dialed_by: who dials each node, if that is known already.
    """
    number = next(number for number, node in enumerate(proof.nodes) if node.member == member)
    failures = {pair: failure for pair, failure in proof.failures.items() if number in pair}
    text = _Text(structs.replace(proof, failures=failures), dialed_by)
    return LeftOut(proof.nodes[number], "; ".join(map(_cut, text.lines())), *text.cause())


def unanswered(proof: Proof, awaited: Container[bytes]) -> str:
    """Say which of the processes that have not confirmed do not answer on a connection that they have accepted."""
    stopped = [proof.nodes[number] for number in sorted({other for _, other in proof.unanswered})]
    lines = [
        f"{node.name}, pid {node.who.pid}, accepts connections and does not answer: "
        "it is stopped or hangs, or most packets to it are lost"
        for node in stopped
        if node.member in awaited
    ]
    more = [f"{len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return "; ".join([*lines[:_NAMED], *more])[:MAX_TEXT_CHARACTERS]


def unproved(proof: Proof) -> str:
    """Return what the proof of a mesh that holds does not show; empty: nothing."""
    total, hidden, said = len(proof.nodes), proof.hidden, []
    if proof.sampled:
        said.append(f"its mesh of {total} nodes is sampled: each node has reached {_dialed(total)} others by TCP")
    if hidden:
        names = [f"{node.name}, whose connections come from {node.who.address}" for node in hidden[:_NAMED]]
        more = [f"{len(hidden) - _NAMED} more"] if len(hidden) > _NAMED else []
        said.append(
            f"that other nodes reach {'; '.join([*names, *more])}, is not proved: that is none of the node's own "
            "addresses, so address translation is between them"
        )
    return _cut("; ".join(said))


def _dialed(nodes: int) -> int:
    return len(targets_of(0, nodes))
