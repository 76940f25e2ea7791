"""What befell a traced packet, told in steps: from events of nft and sightings to an answer. Pure.

Places are those of the guest's way out: tap, bridge, nat, route, rules, and the host's side. The
verdict is what the kernel did; words about groups come from `deciding`. Whatever is not
understood is told as the rule's own text rather than guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from chv.common.wire.nwd_policy import Direction, PathReply, PathStep
from chv.nwd.deciding import Groups, opened
from chv.nwd.kernel.nft_trace import Event, Kind
from chv.nwd.kernel.packet_socket import Sighting
from chv.nwd.kernel.packets import Packet, with_port
from chv.nwd.records import Nic

DELIVERED, FORWARDED, DROPPED, UNKNOWN = "delivered", "forwarded", "dropped", "unknown"
DECIDED_CHARACTERS_MAX = 256
FORWARD, INPUT, POSTROUTING = "forward", "input", "postrouting"
BRIDGED = "the network is open: between its guests no security group is asked"
EXPOSURE_CHAINS = "e_"
TEMPORARY = "chvx"  # so begin the tables that switch tracing on
RuleKey = tuple[str, str, int]  # table, chain, handle


@dataclass(frozen=True)
class Scene:
    """Where the packet moves: all that is known before it is sent."""

    nic: Nic
    tap: str
    uplink: str
    host_uplink: str
    host_table: str
    packet: Packet
    groups: Groups
    taps: Mapping[str, Nic] = field(default_factory=dict)
    exposure: str = ""  # the name of the one that the packet is for
    public: Collection[str] = ()  # public addresses of the network
    uplinks: Collection[str] = ()  # of all networks, on the host

    def nic_at(self, address: str) -> Nic | None:
        """Return the NIC of this network that has an address."""
        return next((nic for nic in self.taps.values() if address in nic.addresses), None)


@dataclass
class Trail:
    """What was seen in one namespace."""

    hooks: Mapping[tuple[str, str], str] = field(default_factory=dict)  # of base chains
    events: list[Event] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)
    rules: Mapping[RuleKey, str] = field(default_factory=dict)

    def passes(self) -> Iterator[tuple[str, Event]]:
        """Yield each event with the hook that it belongs to; those of our own table left out."""
        hook = ""
        for event in self.events:
            if event.table.startswith(TEMPORARY):
                continue
            hook = self.hooks.get((event.table, event.chain), hook)
            yield hook, event

    def drop(self) -> tuple[str, Event] | None:
        """Return where it was dropped."""
        return next((each for each in self.passes() if each[1].verdict == "drop"), None)

    def accepted(self, hook: str) -> list[Event]:
        """Return what let it pass at a hook: one thing for each chain that is asked there."""
        return [event for at, event in self.passes() if at == hook and event.verdict == "accept"]

    def last_packet(self, default: Packet) -> Packet:
        """Return the packet as the rules saw it last."""
        found = [event.packet for event in self.events if event.packet is not None]
        return found[-1] if found else default

    def text(self, event: Event) -> str:
        """Return the rule or policy of an event as it is written."""
        if event.kind is Kind.POLICY:
            return f"policy {event.verdict}"
        return self.rules.get((event.table, event.chain, event.handle), "")


def leaves(scene: Scene, trail: Trail) -> Sighting | None:
    """Return where it has left the network's namespace, or reached a tap."""
    ends = {*scene.taps, scene.uplink}
    return next((each for each in trail.sightings if each.leaves and each.link in ends), None)


def leaves_host(scene: Scene, host: Trail) -> Sighting | None:
    """Return where it has left the host."""
    return next(
        (each for each in host.sightings if each.leaves and each.link != scene.host_uplink), None
    )


def is_settled(scene: Scene, trail: Trail, host: Trail | None) -> bool:
    """Tell whether all that matters has been seen."""
    if trail.drop() is not None or trail.accepted(INPUT):
        return True
    left = leaves(scene, trail)
    if left is None or left.link != scene.uplink or host is None:
        return left is not None
    return bool(host.drop() or host.accepted(INPUT) or leaves_host(scene, host))


# --- telling
def tell(scene: Scene, trail: Trail, host: Trail | None, route: str) -> PathReply:
    """Return the whole answer."""
    steps = [
        PathStep(place="tap", what=f"the guest sends {opened(scene.packet)}", detail=scene.tap),
        *_bridge(trail),
    ]
    found = trail.drop()
    if found is not None and found[1].family == "bridge":
        return _answer(DROPPED, _spoofing(found[1], trail.text(found[1])), steps)
    final = trail.last_packet(scene.packet)
    steps += _translated(scene, trail)
    if any(event.family != "bridge" for _, event in trail.passes()):
        steps.append(PathStep(place="route", what=route or f"no route to {final.destination}"))
    if found is not None:
        why = _denied(scene, trail, found, final)
        steps.append(_rule_step("rules", trail, found[1], "dropped"))
        return _answer(DROPPED, why, steps)
    return _passed(scene, (trail, host), steps, (final, route))


def to_itself(packet: Packet) -> PathReply:
    """Return the answer for a packet that no guest sends out."""
    step = PathStep(place="guest", what=f"{packet.destination} is its own address")
    return _answer(DELIVERED, "the address is the guest's own: nothing leaves it", [step])


def _answer(verdict: str, decided_by: str, steps: list[PathStep]) -> PathReply:
    return PathReply(verdict=verdict, decided_by=decided_by[:DECIDED_CHARACTERS_MAX], steps=steps)


def _bridge(trail: Trail) -> Iterator[PathStep]:
    events = [event for _, event in trail.passes() if event.family == "bridge"]
    last = next((event for event in reversed(events) if event.verdict in ("drop", "accept")), None)
    if last is None:
        return
    what = "MAC and address are the NIC's own" if last.verdict == "accept" else "dropped"
    yield _rule_step("bridge", trail, last, what)


def _rule_step(place: str, trail: Trail, event: Event, what: str) -> PathStep:
    text = trail.text(event)
    where = f"{event.table}/{event.chain}"
    return PathStep(place=place, what=what, detail=f"{where}: {text}" if text else where)


def _translated(scene: Scene, trail: Trail) -> Iterator[PathStep]:
    """Tell of every change of the destination."""
    before = scene.packet
    for event in trail.events:
        after = event.packet
        if after is None or _target(after) == _target(before):
            continue
        yield PathStep(
            place="nat",
            what=f"destination {_target(before)} becomes {_target(after)}",
            detail=f"exposure {scene.exposure}" if scene.exposure else "",
        )
        before = after


def _target(packet: Packet) -> str:
    return with_port(packet.destination, packet.destination_port)


def _source(packet: Packet) -> str:
    return with_port(packet.source, packet.source_port)


def _spoofing(event: Event, text: str) -> str:
    reason = event.chain.removeprefix("drop_") if event.chain.startswith("drop_") else text
    return f"the rules against spoofing ({reason})"


def _denied(scene: Scene, trail: Trail, found: tuple[str, Event], final: Packet) -> str:
    """Say in the words of the objects why it was dropped; else in those of the rule."""
    hook, event = found
    text = trail.text(event)
    if event.chain.startswith(EXPOSURE_CHAINS):
        refuses = "reject" in text
        why = "no healthy target, and refuses" if refuses else f"no source {final.source}"
        return f"exposure {scene.exposure} has {why}"
    if event.chain.startswith("connections_"):
        return "the guest has as many connections as it may have"
    if event.chain == "not_allowed_out":
        if ip_address(final.destination).is_link_local:
            return f"link-local addresses like {final.destination} are not forwarded"
        return scene.groups.denied(scene.nic, Direction.EGRESS, final)
    if event.chain == "not_allowed_in":
        peer = scene.nic_at(final.destination)
        if peer is None:
            return f"no guest of the network has the address {final.destination}"
        return f"{peer.hostname}: {scene.groups.denied(peer, Direction.INGRESS, final)}"
    if hook == INPUT:
        if final.destination in scene.public:
            port = f"{final.protocol} {final.destination_port}"
            return f"no exposure takes {port} at {final.destination}"
        return "the gateway takes DHCP, DNS, ping and metadata alone"
    return f"rule `{text}` in {event.table}/{event.chain}"


def _passed(
    scene: Scene,
    trails: tuple[Trail, Trail | None],
    steps: list[PathStep],
    end: tuple[Packet, str],
) -> PathReply:
    trail, host = trails
    final, route = end
    let_in = trail.accepted(INPUT)
    if let_in:
        steps.append(_rule_step("rules", trail, let_in[-1], "the gateway takes it"))
        return _answer(DELIVERED, "services of the gateway are for every guest", steps)
    accepted = trail.accepted(FORWARD)
    steps += [_rule_step("rules", trail, event, "allowed") for event in accepted]
    left = leaves(scene, trail)
    if left is None:
        verdict = DROPPED if not accepted and not route else UNKNOWN
        return _answer(verdict, _lost(trail, accepted, final, route), steps)
    steps += _source_nat(final, left.packet)
    if left.link != scene.uplink:
        nic = scene.taps[left.link]
        steps.append(PathStep(place="tap", what=f"handed to {nic.hostname}", detail=left.link))
        is_bridged = all(event.family == "bridge" for _, event in trail.passes())
        why = BRIDGED if is_bridged else _allowed(scene, final, nic)
        return _answer(DELIVERED, why, steps)
    steps.append(PathStep(place="uplink", what="leaves the network", detail=left.link))
    allowed = _allowed(scene, final, None)
    return _on_host(scene, host, left.packet, (steps, allowed))


def _source_nat(before: Packet, after: Packet) -> Iterator[PathStep]:
    if before.source != after.source:
        yield PathStep(place="nat", what=f"source {_source(before)} becomes {_source(after)}")


def _lost(trail: Trail, accepted: Sequence[Event], final: Packet, route: str) -> str:
    if not any(event.family != "bridge" for _, event in trail.passes()):
        return "it was not seen beyond the bridge"
    if not route:
        return f"the network has no route to {final.destination}"
    if not accepted:
        return "it was not forwarded, and no rule says why"
    return f"the rules let it pass, and nothing answers for {final.destination} there"


def _allowed(scene: Scene, final: Packet, peer: Nic | None) -> str:
    if scene.exposure:
        return f"exposure {scene.exposure}: its own sources decide, no group"
    out = scene.groups.allowing(scene.nic, Direction.EGRESS, final)
    into = scene.groups.allowing(peer, Direction.INGRESS, final) if peer is not None else ""
    parts = [f"{scene.nic.hostname}, egress: {out}"] if out else []
    parts += [f"{peer.hostname}, ingress: {into}"] if peer is not None and into else []
    return "; ".join(parts) or "the network's rules"


def _on_host(
    scene: Scene, host: Trail | None, packet: Packet, so_far: tuple[list[PathStep], str]
) -> PathReply:
    steps, allowed = so_far
    if host is None:
        return _answer(FORWARDED, allowed, steps)
    found = host.drop()
    if found is not None:
        event = found[1]
        steps.append(_rule_step("host", host, event, "dropped"))
        return _answer(DROPPED, _denied_by_host(scene, host, found), steps)
    left = leaves_host(scene, host)
    if left is not None:
        steps += [_on_hosts_side(each) for each in _source_nat(packet, left.packet)]
        inward = left.link in scene.uplinks
        what = "enters another network of the node" if inward else "leaves the host"
        steps.append(PathStep(place="host", what=what, detail=left.link))
        return _answer(FORWARDED, allowed, steps)
    if host.accepted(INPUT):
        steps.append(PathStep(place="host", what="taken by the host itself"))
        return _answer(FORWARDED, allowed, steps)
    steps.append(PathStep(place="host", what="not seen leaving the host"))
    why = f"the host did not send it on: no route, or nothing answers for {packet.destination}"
    return _answer(UNKNOWN, why, steps)


def _denied_by_host(scene: Scene, host: Trail, found: tuple[str, Event]) -> str:
    hook, event = found
    if event.table == scene.host_table and hook == INPUT:
        return "the node itself takes nothing but ping from guests"
    if event.table == scene.host_table and event.chain == "into_tenant":
        return "it leads to another network, which takes no connections from there"
    text = host.text(event) or "a rule"
    return f"the host's own rules: `{text}` in table {event.table}, chain {event.chain}"


def _on_hosts_side(step: PathStep) -> PathStep:
    return PathStep(place="host", what=step.what, detail=step.detail)


def events_of_rules(events: Sequence[Event]) -> list[Event]:
    """Return the events whose rule's text is worth asking for."""
    return [
        event
        for event in events
        if event.handle
        and event.verdict in ("drop", "accept")
        and not event.table.startswith(TEMPORARY)
    ]
