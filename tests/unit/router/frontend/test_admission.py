"""Room for requests is counted in bytes too."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.constraint import Constraint
from diptych.errors import (
    DeadlineExceededError,
    ModelNotFoundError,
    QueueFullError,
    WorkerDrainingError,
)
from diptych.service_level import NO_LEVEL
from diptych.tenant import NOBODY
from diptych.text.thought_form import ThoughtForm
from router.config import RouterConfig
from router.frontend.admission import Admission
from router.frontend.served_model import ServedModel
from router.frontend.validation import EncodedPrompt


def admission(max_open_bytes: int) -> Admission:
    unused: Any = SimpleNamespace()
    config = RouterConfig(model="m", decode=["a:1"], max_open_bytes=max_open_bytes)
    return Admission(unused, unused, config)


async def test_open_requests_have_a_budget_of_bytes() -> None:
    door = admission(100)
    with door.hold(60):
        with pytest.raises(QueueFullError), door.hold(41):
            raise AssertionError("let in")
        with door.hold(40):
            assert door.num_open == 2
        with door.hold(40):
            pass
    assert door.num_open == 0
    with door.hold(100):
        pass
    await door.wait_idle()


async def test_a_request_that_fails_is_counted_out() -> None:
    door = admission(100)
    with pytest.raises(KeyError), door.hold(100):
        raise KeyError
    with door.hold(100):
        assert door.num_open == 1


async def test_a_constraint_behind_others_waits_no_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = admission(100)

    async def tokenize(request: object) -> EncodedPrompt:
        return EncodedPrompt([1])

    async def never(constraint: Constraint, emitted: bytes, thoughts: ThoughtForm | None) -> str:
        await asyncio.Event().wait()
        raise AssertionError("it ended")

    model: Any = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_ids=frozenset()))
    monkeypatch.setattr(door, "_model", model)
    monkeypatch.setattr(door, "_resolve", lambda *_: None)
    monkeypatch.setattr(door, "_tokenize", tokenize)
    monkeypatch.setattr(door._constraints, "check", never)
    sampling = SimpleNamespace(constraint=Constraint.regex("a+"))
    request: Any = SimpleNamespace(
        prompt=None, sampling=sampling, emitted_token_ids=(), level=NO_LEVEL, tenant=NOBODY
    )
    async with asyncio.timeout(5):
        with pytest.raises(DeadlineExceededError):
            await door.admit(request, time.monotonic() + 0.02)


async def test_a_drain_refuses_what_is_new_and_no_part_of_what_was_let_in() -> None:
    door = admission(100)
    door._model = cast(ServedModel, SimpleNamespace(name="m"))
    request: Any = SimpleNamespace(model="other", level=NO_LEVEL, tenant=NOBODY)
    door.drain()
    with pytest.raises(WorkerDrainingError):
        await door.admit(request, None)
    with pytest.raises(ModelNotFoundError):  # it was looked at
        await door.admit(request, None, is_part=True)
