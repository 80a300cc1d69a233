"""Room for requests is counted in bytes too."""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.constraint import Constraint, ConstraintKind
from diptych.errors import (
    DeadlineExceededError,
    DiptychError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    QueueFullError,
    WorkerDrainingError,
)
from diptych.sampling_params import NOTHING_SAID, SamplingOptions
from diptych.service_level import NO_LEVEL
from diptych.tenant import NOBODY, Tenant
from diptych.text.chat_template import Message, Tool
from router.cluster.members import Cluster
from router.config import RouterConfig
from router.frontend import validation
from router.frontend.admission import Admission
from router.frontend.served_model import ServedModel
from router.frontend.validation import EncodedPrompt
from router.generation.request import (
    ChatPrompt,
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
)
from tests.text_models import byte_level_tokenizer, write_folder

FREE = 65_536  # bytes of each request that need no room


def admission(max_open_bytes: int = 10**6, **settings: Any) -> Admission:
    unused: Any = SimpleNamespace()
    config = RouterConfig(
        model="m",
        decode=["a:1"],
        max_open_bytes=max_open_bytes,
        max_request_bytes=max_open_bytes,
        **settings,
    )
    return Admission(unused, unused, config)


class Unfound:
    """A cluster of which nobody was ever heard."""

    max_model_len = None

    async def wait_found(self) -> None:
        await asyncio.Event().wait()


async def test_open_requests_have_a_budget_of_bytes() -> None:
    door, other = admission(100), Tenant("other")
    with door.hold(NOBODY, FREE + 60):
        with pytest.raises(QueueFullError), door.hold(other, FREE + 41):
            raise AssertionError("let in")
        with door.hold(other, FREE + 40):
            assert door.num_open == 2
        with door.hold(other, FREE + 40):
            pass
    assert door.num_open == 0
    with door.hold(NOBODY, FREE + 100):
        pass
    await door.wait_idle()


def test_a_tenants_large_requests_leave_others_room_and_keep_out_no_small_one() -> None:
    door, mallory, bob = admission(), Tenant("mallory"), Tenant("bob")
    with ExitStack() as held:
        for _ in range(5):
            held.enter_context(door.hold(mallory, FREE + 10**5))
        with pytest.raises(QueueFullError), door.hold(mallory, FREE + 1):
            raise AssertionError("it holds half of all, as much as is free")
        for each in (mallory, bob):
            held.enter_context(door.hold(each, 200))
            held.enter_context(door.hold(each, FREE))
        held.enter_context(door.hold(bob, FREE + 3 * 10**5))
        with pytest.raises(QueueFullError), door.hold(bob, FREE + 1):
            raise AssertionError("let in")
        held.enter_context(door.hold(Tenant("carol"), FREE + 10**5))
    assert door.num_open == 0
    with door.hold(mallory, FREE + 10**6):
        pass


async def test_a_request_that_fails_is_counted_out() -> None:
    door = admission(100)
    with pytest.raises(KeyError), door.hold(NOBODY, FREE + 100):
        raise KeyError
    with door.hold(NOBODY, FREE + 100):
        assert door.num_open == 1


async def test_a_constraint_behind_others_waits_no_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = admission(100)

    async def tokenize(request: object, deadline_s: float | None) -> EncodedPrompt:
        return EncodedPrompt([1])

    async def never(constraint: Constraint, emitted: bytes, **_: object) -> str:
        await asyncio.Event().wait()
        raise AssertionError("it ended")

    model: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(eos_token_ids=frozenset()), response_template=None
    )
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


@pytest.mark.parametrize("schema", ['{"type": "object"}', '{"type": "banana"}'])
async def test_a_form_beside_a_required_call_is_checked_and_says_nothing(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = admission(100)
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(eos_token_ids=frozenset()), response_template=None
    )
    monkeypatch.setattr(door, "_model", model)
    chat = ChatPrompt((Message("user", "a"),), tools=(Tool("f"),), tool_choice=ToolChoice.REQUIRED)
    options = SamplingOptions(constraint=Constraint(ConstraintKind.JSON_SCHEMA, (schema,)))
    request = GenerationRequest(prompt=chat, sampling=options, num_bytes=0)
    try:
        checking = door._check_constraint(request, EncodedPrompt([1]), None)
        if "banana" in schema:
            with pytest.raises(InvalidRequestError, match="cannot be held to") as caught:
                await checking
            assert caught.value.field == "sampling.constraint.json_schema"
        else:
            form = await checking
            assert form is not None
            assert "call_0" in form.grammar
    finally:
        await door.close()


async def test_many_tokens_become_text_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = admission()
    tokenizer = write_folder(tmp_path, byte_level_tokenizer())
    threads: list[threading.Thread] = []

    def decode(token_ids: Sequence[int], *, skip_special: bool) -> str:
        threads.append(threading.current_thread())
        return tokenizer.decode(token_ids, skip_special=skip_special)

    model = SimpleNamespace(tokenizer=SimpleNamespace(decode=decode))
    monkeypatch.setattr(door, "_model", model)
    ids = tokenizer.encode("ab")
    for num, is_here in ((1, True), (5000, False)):
        said = await door.decode(ids * num, skip_special=True, tenant=NOBODY, deadline_s=None)
        assert said == "ab" * num
        assert (threads.pop() is threading.main_thread()) == is_here
    with pytest.raises(DeadlineExceededError):
        await door.decode(
            ids * 5000, skip_special=True, tenant=NOBODY, deadline_s=time.monotonic() - 1
        )
    await door.close()


async def test_a_drain_refuses_what_is_new_and_no_part_of_what_was_let_in() -> None:
    door = admission(100)
    door._model = cast(ServedModel, SimpleNamespace(name="m"))
    request: Any = SimpleNamespace(model="other", level=NO_LEVEL, tenant=NOBODY)
    door.drain()
    with pytest.raises(WorkerDrainingError):
        await door.admit(request, None)
    with pytest.raises(ModelNotFoundError):  # it was looked at
        await door.admit(request, None, is_part=True)


@pytest.mark.parametrize(
    ("workers_len", "expected"), [(None, 100), (50, 50), (100, 100), (200, 100)]
)
def test_the_context_is_what_the_model_and_all_workers_have(
    workers_len: int | None, expected: int
) -> None:
    model: Any = SimpleNamespace(tokenizer=SimpleNamespace(max_model_len=100))
    cluster: Any = SimpleNamespace(max_model_len=workers_len)
    door = Admission(model, cluster, RouterConfig(model="m", decode=["a:1"]))
    assert door.max_model_len == expected


@pytest.mark.parametrize(
    ("patience_s", "left_s", "expected"),
    [
        (0.01, None, NoWorkerError),
        (0.01, 60.0, NoWorkerError),
        (60.0, 0.01, DeadlineExceededError),
    ],
)
async def test_who_waited_in_vain_for_a_worker_leaves_its_place(
    patience_s: float, left_s: float | None, expected: type[DiptychError]
) -> None:
    door = admission(max_queue=1, timers={"no_worker_s": patience_s})
    door._cluster = cast(Cluster, Unfound())
    for _ in range(2):
        deadline_s = None if left_s is None else time.monotonic() + left_s
        with pytest.raises(expected):
            await door.admit_prompts("scoring", deadline_s)


async def test_no_more_wait_for_the_first_worker_than_may() -> None:
    door = admission(max_queue=2)
    door._cluster = cast(Cluster, Unfound())
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(door.admit_prompts("scoring", None)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await door.admit_prompts("scoring", None)
        for each in waiting:
            each.cancel()


@pytest.mark.parametrize("what", ["admit", "check", "tokenize"])
async def test_a_long_prompt_waits_for_its_turn_no_longer_than_the_deadline(what: str) -> None:
    door = admission()
    tokenizer = SimpleNamespace(vocab_size=9, max_model_len=100, eos_token_ids=frozenset[int]())
    model: Any = SimpleNamespace(name="m", tokenizer=tokenizer, recommended=NOTHING_SAID)
    door._model, door._cluster = model, cast(Cluster, Unfound())
    request = GenerationRequest(prompt=TextPrompt("a"), sampling=NOTHING_SAID, num_bytes=10**6)
    places = door._to_tokenize
    async with asyncio.timeout(5), places.place("other"), places.place("another"):
        with pytest.raises(DeadlineExceededError):
            await getattr(door, what)(request, time.monotonic() + 0.02)
        assert places._num_waiting == 0
        assert not places._lines
    await door.close()


async def test_a_long_prompt_that_is_refused_leaves_its_place(tmp_path: Path) -> None:
    door = admission(max_queue=1)
    tokenizer = write_folder(tmp_path, byte_level_tokenizer())
    model: Any = SimpleNamespace(name="m", tokenizer=tokenizer, recommended=NOTHING_SAID)
    door._model, door._cluster = model, cast(Cluster, Unfound())
    text = "diptych " * 131_072
    request = GenerationRequest(prompt=TextPrompt(text), sampling=NOTHING_SAID, num_bytes=len(text))
    for _ in range(5):  # more than may wait
        with pytest.raises(InvalidRequestError):
            await door.tokenize(request, None)


@pytest.mark.parametrize(("has_workers", "drains"), [(True, False), (True, True), (False, False)])
def test_detail_22_it_is_ready_while_a_request_could_be_placed(
    has_workers: bool, drains: bool
) -> None:
    door = admission()
    door._cluster = cast(Cluster, SimpleNamespace(is_ready=has_workers))
    if drains:
        door.drain()
    assert door.is_ready == (has_workers and not drains)


async def test_who_leaves_does_not_free_a_thread_that_still_tokenises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, begun = threading.Event(), threading.Semaphore(0)
    at_once: list[int] = []
    now = 0

    def tokenize(*asked: object) -> None:
        nonlocal now
        now += 1
        at_once.append(now)
        begun.release()
        goes_on.wait(60)
        now -= 1

    monkeypatch.setattr("router.frontend.validation.tokenize", tokenize)
    model: Any = SimpleNamespace(tokenizer=None)
    config = RouterConfig(model="m", decode=["a:1"])
    door = Admission(model, cast(Cluster, Unfound()), config)
    request: Any = SimpleNamespace(num_bytes=10**6, prompt=None, tenant=NOBODY)
    loop = asyncio.get_running_loop()
    left = [loop.create_task(door._encode(request, 10)) for _ in range(8)]
    await loop.run_in_executor(None, begun.acquire)
    await loop.run_in_executor(None, begun.acquire)
    for each in left:
        each.cancel()
    await asyncio.wait(left)
    last = loop.create_task(door._encode(request, 10))
    await asyncio.sleep(0)
    goes_on.set()
    await last
    await door.close()
    assert max(at_once) == 2
    assert len(at_once) == 3, "those that waited for a thread were never begun"


async def test_bad_words_of_many_prompts_take_the_loop_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are encoded by another thread, and once, however many prompts have the same ones."""
    door = admission()
    tokenizer = write_folder(tmp_path, byte_level_tokenizer())
    model: Any = SimpleNamespace(name="m", tokenizer=tokenizer, recommended=NOTHING_SAID)
    door._model, door._cluster = model, cast(Cluster, Unfound())
    threads: list[threading.Thread] = []
    encode = validation.tokenize_bad_words

    def noted(*given: Any) -> frozenset[tuple[int, ...]]:
        threads.append(threading.current_thread())
        return encode(*given)

    monkeypatch.setattr(validation, "tokenize_bad_words", noted)

    def asked(*words: str) -> GenerationRequest:
        sampling = replace(NOTHING_SAID, bad_words=words)
        return GenerationRequest(prompt=TokenPrompt((1,)), sampling=sampling, num_bytes=9)

    for _ in range(20):
        resolved = await door.check(asked("one", "two"), None)
        assert resolved.sampling.bad_words == encode(["one", "two"], tokenizer)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert (await door.check(asked(), None)).sampling.bad_words == frozenset()
    for number in range(100):  # and few are kept
        await door.check(asked(str(number)), None)
    assert len(threads) == 101
    assert len(door._bad_words) < 20
    with pytest.raises(InvalidRequestError) as caught:
        await door.check(asked("one", ""), None)
    assert caught.value.metadata["field"] == "sampling.bad_words[1]"
