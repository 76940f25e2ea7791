"""What every resource is made of: the base struct, metadata, conditions, common field types."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from chv.common.wire.types import GENERATION_MAX, FrozenMeta, Name, Text

T = TypeVar("T")

Quantity = Annotated[
    str, Meta(min_length=1, max_length=32, description="Kubernetes quantity: 512Mi, 2Gi")
]
QuantityOrEmpty = Annotated[
    str, Meta(max_length=32, description="Kubernetes quantity: 512Mi, 2Gi; or empty")
]
Duration = Annotated[
    str, Meta(pattern=r"^[0-9]{1,6}(ms|s|m|h)\Z", description="duration: 500ms, 30s, 5m, 2h")
]
LabelValue = Annotated[str, Meta(max_length=63)]
LabelKey = Annotated[str, Meta(min_length=1, max_length=317)]
# As others write them: they are compared and shown, so bounded, and no more is asked of them.
UidText = Annotated[str, Meta(max_length=64)]
TimeText = Annotated[str, Meta(max_length=64)]


class Struct(msgspec.Struct, metaclass=FrozenMeta, rename="camel", forbid_unknown_fields=True):
    """Base of everything in a manifest."""


def always(value: T) -> T:
    """Return a default that is written all the same: `omit_defaults` spares made ones."""
    made: T = msgspec.field(default_factory=lambda: value)
    return made


class OwnerReference(Struct, kw_only=True, frozen=True):
    """As in Kubernetes: the object goes when its owner goes.

    Without a `uid` it is the object of that kind and name in the same namespace or file.
    """

    api_version: Annotated[str, Meta(max_length=317)]
    kind: Annotated[str, Meta(max_length=63)]
    name: Name
    uid: UidText = ""
    controller: bool = False
    block_owner_deletion: bool = False


class ObjectMeta(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Standard object metadata; the server fills what a user cannot know."""

    name: Name
    # Empty in a file means `default`; with a default of its own it would not be shown.
    namespace: Annotated[
        str, Meta(max_length=63, pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?\Z")
    ] = ""
    uid: UidText = ""
    generation: Annotated[int, Meta(ge=0, le=GENERATION_MAX)] = 0
    resource_version: Annotated[str, Meta(max_length=32)] = ""
    labels: Annotated[dict[LabelKey, LabelValue], Meta(max_length=64)] = {}
    annotations: Annotated[dict[LabelKey, Text], Meta(max_length=64)] = {}
    finalizers: Annotated[list[LabelKey], Meta(max_length=16)] = []
    owner_references: Annotated[list[OwnerReference], Meta(max_length=8)] = []
    creation_timestamp: TimeText = ""
    deletion_timestamp: TimeText = ""
    managed_fields: Any = None  # taken from a file and ignored, as kubectl writes it


class ConditionStatus(StrEnum):
    """Unknown is a state of its own: silence is not an answer."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Struct, kw_only=True, frozen=True):
    """One fact, with the evidence that it rests on and when that was last seen."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""
    evidence: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""
    last_probe_time: str = ""


class ImageFormat(StrEnum):
    """Disk formats; declared, never probed."""

    RAW = "raw"
    QCOW2 = "qcow2"
