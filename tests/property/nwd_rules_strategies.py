"""Networks of any shape for the renderer: few guests, groups and exposures, combined at will."""

from __future__ import annotations

from hypothesis import strategies as st

from chv.common.wire.nwd import L2Mode
from chv.common.wire.nwd_policy import Algorithm, Direction, IpProtocol
from chv.nwd.nft.model import MASQUERADE, Backend, Exposed, Group, NetworkRules, NicRules, Rule


def uid(number: int) -> str:
    return f"{number:08x}-0000-4000-8000-{number:012x}"


GROUP_IDS = [uid(0x100 + number) for number in range(4)]
CIDRS = [
    "0.0.0.0/0",
    "::/0",
    "10.0.0.0/8",
    "10.1.0.0/16",
    "192.0.2.7/32",
    "fd00::/8",
    "fd00::5/128",
]
_some_cidrs = st.lists(st.sampled_from(CIDRS), max_size=3, unique=True).map(tuple)
_ports = st.tuples(st.integers(1, 65535), st.integers(0, 100)).map(
    lambda pair: (pair[0], min(65535, sum(pair)))
)
_numbers = st.sampled_from([0, 0, 1, 7])
_groups = st.lists(st.sampled_from(GROUP_IDS), max_size=3, unique=True).map(tuple)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    protocol = draw(st.sampled_from(list(IpProtocol)))
    has_ports = protocol in (IpProtocol.TCP, IpProtocol.UDP)
    return Rule(
        draw(st.sampled_from(list(Direction))),
        protocol,
        tuple(draw(st.lists(_ports, max_size=3))) if has_ports else (),
        draw(_some_cidrs),
        draw(_groups),
        draw(_numbers),
        draw(_numbers),
        draw(st.booleans()),
    )


_group_sets = st.lists(
    st.builds(
        Group,
        st.sampled_from(GROUP_IDS),
        st.lists(rules(), max_size=3).map(tuple),
        st.booleans(),
    ),
    max_size=4,
    unique_by=lambda group: group.group_id,
).map(tuple)


@st.composite
def nics(draw: st.DrawFn, number: int) -> NicRules:
    four, six = f"10.0.0.{number + 10}", f"fd00::{number + 16:x}"
    return NicRules(
        uid(number),
        f"t{number:010x}",
        f"02:00:00:00:00:{number:02x}",
        draw(st.sampled_from([(four,), (four, six)])),
        draw(st.sampled_from([(), (22,), (22, 80)])),
        draw(_groups),
        draw(_numbers),
        draw(st.sampled_from(["", "", "198.51.100.9"])),
    )


@st.composite
def exposures(draw: st.DrawFn, number: int) -> Exposed:
    address = st.sampled_from([f"10.0.0.{each}" for each in range(10, 15)] + ["fd00::10"])
    port = draw(st.sampled_from([0, 80]))
    backends = draw(st.lists(address, max_size=4, unique=True))
    first = 1000 * (number + 1)
    last = first + draw(st.integers(0, 500)) if port == 0 else first
    return Exposed(
        uid(0x200 + number),
        draw(st.sampled_from([IpProtocol.TCP, IpProtocol.UDP])),
        draw(st.sampled_from([("10.0.0.200",), ("10.0.0.200", "fd00::200")])),
        (first, last),
        draw(_some_cidrs),
        tuple(Backend(each, port) for each in backends),
        draw(st.sampled_from(list(Algorithm))),
        tuple(Backend(each, 8080) for each in backends[:2]),
    )


@st.composite
def networks(draw: st.DrawFn) -> NetworkRules:
    v6 = draw(st.sampled_from([True, True, True, False]))
    numbers = draw(st.sets(st.integers(0, 5), max_size=5))
    exposed = draw(st.sets(st.integers(0, 3), max_size=3))
    return NetworkRules(
        identity="chv:1:abc123:network",
        bridge="br0",
        uplink="up0",
        subnet="10.0.0.0/24",
        gateway="10.0.0.1",
        subnet6="fd00::/64" if v6 else "",
        gateway6="fd00::1" if v6 else "",
        l2=L2Mode.ISOLATED,
        source=MASQUERADE,
        nics=tuple(draw(nics(number)) for number in sorted(numbers)),
        groups=draw(_group_sets),
        exposures=tuple(draw(exposures(number)) for number in sorted(exposed)),
    )
