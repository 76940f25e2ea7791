"""What only nwd can tell of an exposure's addresses, asked before it is stored.

Addresses of the network's own are judged by admission; the others must be the node's. While nwd is
away nothing is asked: the object then says itself what is wrong with it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from chv.agent.context import Context
from chv.agent.network.policy import EXPOSED
from chv.common.errors import ChvError, InvalidArgument, Unavailable, Unsupported
from chv.common.wire import nwd_policy as policy
from chv.common.wire.network_rules import contains
from chv.common.wire.resources import Exposure, Network, Resource, UplinkModeSpec

_FIELDS = {
    "exposure.port": "spec.port",
    "exposure.port_end": "spec.endPort",
    "exposure.target_port": "spec.targetPort",
}


async def check_exposures(context: Context, resources: Sequence[Resource]) -> None:
    """Raise for an exposure that the node could not serve."""
    for resource in resources:
        if isinstance(resource, Exposure):
            network = _network(context, resources, resource)
            if network is not None:
                await _check(context, resource, network)


def _network(context: Context, resources: Sequence[Resource], exposure: Exposure) -> Network | None:
    """Return its network as it will be; None: refused by admission."""
    key = (exposure.metadata.namespace, exposure.spec.network)
    for resource in resources:
        place = (resource.metadata.namespace, resource.metadata.name)
        if isinstance(resource, Network) and place == key:
            return resource
    found = context.ledger.tables.find("Network", *key)
    if found is None or not isinstance(found.resource, Network):
        return None
    return found.resource


async def _check(context: Context, exposure: Exposure, network: Network) -> None:
    metadata = exposure.metadata
    title = f"Exposure {metadata.namespace}/{metadata.name}"
    known = context.ledger.tables.find("Exposure", metadata.namespace, metadata.name)
    outer = _outer(exposure, network)
    if not outer or (known is not None and _claim(known.resource) == _claim(exposure)):
        return
    if network.spec.uplink is UplinkModeSpec.NONE:
        raise InvalidArgument(
            f"{outer[0][1]} is not in a subnet of network {network.metadata.name!r}, which has no"
            " uplink",
            resource=title,
            field=f"spec.addresses[{outer[0][0]}]",
            hint="take a free address of its subnet, or give the network an uplink",
        )
    uid = known.uid if known is not None else context.world.ids.uid()
    request = policy.CheckExposure(exposure=_probe(exposure, uid, [text for _, text in outer]))
    try:
        await context.nwd.call(policy.CHECK_EXPOSURE, request)
    except (Unavailable, Unsupported):
        return
    except ChvError as error:
        fields = {f"exposure.addresses[{at}]": index for at, (index, _) in enumerate(outer)}
        error.resource = title
        if error.field in fields:
            error.field = f"spec.addresses[{fields[error.field]}]"
        else:
            error.field = _FIELDS.get(error.field, "")
        raise


def _outer(exposure: Exposure, network: Network) -> list[tuple[int, str]]:
    """Return those addresses, with their places, that are nothing of the network's own."""
    texts = filter(None, (network.spec.subnet, network.spec.subnet6))
    subnets = [ipaddress.ip_network(text) for text in texts]
    return [
        (index, text)
        for index, text in enumerate(exposure.spec.addresses)
        if text not in network.spec.public_addresses
        and not any(contains(subnet, ipaddress.ip_address(text)) for subnet in subnets)
    ]


def _claim(resource: Resource) -> tuple[object, ...]:
    """Return what it asks of the node: the same again is not asked about."""
    assert isinstance(resource, Exposure)
    spec = resource.spec
    return spec.network, spec.addresses, spec.protocol, spec.port, spec.end_port


def _probe(exposure: Exposure, uid: str, addresses: list[str]) -> policy.Exposure:
    spec = exposure.spec
    return policy.Exposure(
        exposure_id=uid,
        name=exposure.metadata.name,
        network_id=uid,
        protocol=EXPOSED[spec.protocol],
        addresses=addresses,
        port=spec.port,
        port_end=spec.end_port,
        target_port=spec.target_port,
        sources=spec.sources,
    )
