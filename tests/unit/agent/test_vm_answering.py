"""A VMM that was started is waited for, and not for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from chv.agent.vm import answering
from chv.common.errors import ChvError, FailedPrecondition, NotFound, Unavailable


class Starting:
    """A VMM that answers at its n-th question."""

    def __init__(self, *errors: ChvError) -> None:
        self.errors = list(errors)

    async def observe(self, _: object) -> None:
        await anyio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop(0)


async def wait_for(vmm: Starting) -> None:
    context = SimpleNamespace(world=SimpleNamespace(vmm=vmm))
    await answering.await_answer(cast(Any, context), cast(Any, None))


async def test_vmm_that_needs_a_moment_is_waited_for() -> None:
    vmm = Starting(NotFound("no socket"), Unavailable("refused"), Unavailable("refused"))
    await wait_for(vmm)
    assert vmm.errors == []


async def test_vmm_that_never_answers_is_left_to_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "ANSWER_S_MAX", 0.05)
    vmm = Starting(*[Unavailable("refused")] * 1000)
    await wait_for(vmm)
    assert vmm.errors


async def test_vmm_that_says_something_else_is_not_asked_again() -> None:
    with pytest.raises(FailedPrecondition):
        await wait_for(Starting(FailedPrecondition("no")))
