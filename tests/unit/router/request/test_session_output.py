"""Which of a session's output goes past the task that takes it."""

import asyncio

import pytest

from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingParams
from diptych.text.detokenizer import Detokenizer
from diptych.text.response.families import family
from diptych.text.response.parser import ResponseParser
from diptych.text.tokenizer import Tokenizer
from diptych.v1 import common_pb2, decode_pb2
from router.generation.answer import ChoiceFinished, Delta
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import DecodeOnly, Why
from router.request.answer_split import AnswerSplit
from router.request.emitted_tokens import RequestShape
from router.request.resolved import ResolvedRequest
from router.request.response_builder import ResponseBuilder
from router.request.session import Session
from router.untaken import Taker, Untaken
from tests.unit.router.request.dispatch_world import DECODE, PROMPT, Untraced, World, opened

A, B, C, D = 66, 67, 68, 69


class Taking:
    """An outlet; what it is given."""

    def __init__(self) -> None:
        self.is_open = True
        self.taken: list[str] = []

    def write(self, delta: Delta) -> None:
        self.taken.append(delta.text or delta.reasoning)


class Booking(Untraced):
    """Remembers how many tokens each response had, and whether one was before it."""

    def __init__(self) -> None:
        self.books: list[tuple[int, bool]] = []

    def written(self, num_tokens: int, gap_s: float | None) -> None:
        self.books.append((num_tokens, gap_s is not None))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(LeastLoaded, "place", lambda *asked: DecodeOnly(DECODE, Why.CHOICE))
    return opened(monkeypatch)


class Run:
    """A sequence that runs on its worker."""

    def __init__(
        self,
        world: World,
        tokenizer: Tokenizer,
        interval: int = 1,
        split: AnswerSplit | None = None,
        max_tokens: int = 4,
        max_unsent: int = 9,
        taker: Taker | None = None,
    ) -> None:
        self.outlet, self.observer = Taking(), Booking()
        self._num_tokens = len(PROMPT)
        world.welcomes(DECODE)
        shape = RequestShape(prompt_ids=PROMPT, max_tokens=max_tokens)
        answer = ResponseBuilder(
            shape,
            Detokenizer(tokenizer),
            received_s=0.0,
            clock=lambda: 1.0,
            max_unsent=max_unsent,
            interval=interval,
            split=split,
        )
        self.session = Session(
            "r",
            ResolvedRequest(shape=shape, sampling=SamplingParams(max_tokens=max_tokens)),
            answer,
            self.observer,
            world.services,
            deadline_s=None,
            on_failed=lambda: None,
            outlet=self.outlet,
            taker=taker,
        )
        self.session.start()
        world.services.room.pump()
        reserved = decode_pb2.Reserved(sequence_id=1)
        self.session.on_decode_event(decode_pb2.DecodeEvent(reserved=reserved))

    def tell(self, *token_ids: int) -> None:
        position, self._num_tokens = self._num_tokens, self._num_tokens + len(token_ids)
        self.session.on_tokens(
            decode_pb2.SequenceTokens(sequence_id=1, position=position, token_ids=token_ids)
        )

    def finish(self) -> None:
        ended = decode_pb2.Ended(sequence_id=1, finish_reason=common_pb2.FINISH_REASON_LENGTH)
        self.session.on_decode_event(decode_pb2.DecodeEvent(ended=ended))


async def asking(run: Run, tasks: asyncio.TaskGroup) -> asyncio.Task[object]:
    """The task that takes the output, and waits for it."""
    task: asyncio.Task[object] = tasks.create_task(run.session.next_event())
    await asyncio.sleep(0)
    return task


async def test_what_comes_while_the_task_waits_goes_past_it(
    world: World, tokenizer: Tokenizer
) -> None:
    """All but the first, and the end; each is booked as it is written."""
    run = Run(world, tokenizer)
    async with asyncio.TaskGroup() as tasks:
        first = await asking(run, tasks)
        run.tell(A)
        assert run.outlet.taken == []
        assert await first == Delta("a", [A], 0, [])
        rest = await asking(run, tasks)
        run.tell(B)
        run.tell(C)
        assert run.outlet.taken == ["b", "c"]
        assert run.observer.books == [(1, False), (1, True), (1, True)]
        await asyncio.sleep(0)
        assert not rest.done()
        run.tell(D)
        run.finish()
        assert await rest == ChoiceFinished(FinishReason.LENGTH, None)
    assert run.outlet.taken == ["b", "c", "d"]
    assert await run.session.next_event() is None
    run.session.close()


async def test_thoughts_and_what_follows_them_go_past_it_together(
    world: World, tokenizer: Tokenizer
) -> None:
    """They do not join, and came in one message."""
    split = AnswerSplit(ResponseParser(family("think"), "", {}), str)
    run = Run(world, tokenizer, split=split, max_tokens=40)
    opening, thought, said = [
        [t for c in text for t in tokenizer.encode(c, add_special=False)]
        for text in ("<think>", "ab</think>", "cd")
    ]
    async with asyncio.TaskGroup() as tasks:
        first = await asking(run, tasks)
        run.tell(*opening)
        await first
        rest = await asking(run, tasks)
        run.tell(*thought, *said)
        assert run.outlet.taken == ["ab", "cd"]
        assert [number for number, _ in run.observer.books[1:]] == [len(thought), len(said)]
        rest.cancel()
    run.session.close()


async def test_what_comes_while_the_task_writes_is_handed_to_it(
    world: World, tokenizer: Tokenizer
) -> None:
    run = Run(world, tokenizer)
    run.tell(A)
    assert await run.session.next_event() == Delta("a", [A], 0, [])
    run.tell(B)
    assert run.outlet.taken == []
    assert await run.session.next_event() == Delta("b", [B], 1, [])
    run.session.close()


async def test_where_the_outlet_is_closed_the_task_has_it(
    world: World, tokenizer: Tokenizer
) -> None:
    run = Run(world, tokenizer)
    run.tell(A)
    await run.session.next_event()
    run.outlet.is_open = False
    async with asyncio.TaskGroup() as tasks:
        rest = await asking(run, tasks)
        run.tell(B)
        run.outlet.is_open = True
        run.tell(C)  # nothing goes past the task while it has something to write
        assert await rest == Delta("bc", [B, C], 1, [])
    assert run.outlet.taken == []
    run.session.close()


async def test_nothing_is_written_for_a_task_that_was_cancelled(
    world: World, tokenizer: Tokenizer
) -> None:
    run = Run(world, tokenizer)
    run.tell(A)
    await run.session.next_event()
    async with asyncio.TaskGroup() as tasks:
        rest = await asking(run, tasks)
        rest.cancel()
        run.tell(B)
    assert run.outlet.taken == []
    run.session.close()


async def test_tokens_that_go_out_together_do_so_past_the_task_too(
    world: World, tokenizer: Tokenizer
) -> None:
    run = Run(world, tokenizer, interval=2)
    run.tell(A)
    await run.session.next_event()
    async with asyncio.TaskGroup() as tasks:
        rest = await asking(run, tasks)
        run.tell(B)
        assert run.outlet.taken == []
        run.tell(C)
        assert run.outlet.taken == ["bc"]
        rest.cancel()
    run.session.close()


async def test_what_was_taken_and_not_written_counts_as_unread_until_the_next_is_asked_for(
    world: World, tokenizer: Tokenizer
) -> None:
    taker = Untaken(lambda: 0.0).open("client")
    run = Run(world, tokenizer, max_tokens=40, max_unsent=30, taker=taker)
    for _ in range(20):
        run.tell(A)
    num_unread = taker.num_bytes
    assert num_unread > 0
    assert isinstance(run.session.poll(), Delta)
    assert taker.num_bytes == num_unread, "it is being written"
    assert run.session.poll() is None
    assert taker.num_bytes == 0
    run.session.close()
