"""Several answers to one prompt are taken in turn, and begin when the first one runs."""

import asyncio
import math
from collections.abc import Callable
from typing import cast

import pytest

from diptych.client.answer_reader import AnswerReader
from diptych.errors import ModelChangedError, SlowClientError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingParams
from diptych.text.detokenizer import Detokenizer
from diptych.text.tokenizer import Tokenizer
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from diptych.v1 import decode_pb2, inference_pb2
from router.cluster.members import Cluster
from router.generation.answer import ChoiceFinished, Delta
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import DecodeOnly, Why
from router.placement.views import WorkerId
from router.request import actions, events
from router.request.best_choices import BestChoices
from router.request.choices import Choices, MakeSession
from router.request.emitted_tokens import RequestShape
from router.request.resolved import ResolvedRequest
from router.request.response_builder import ResponseBuilder
from router.request.session import Session
from router.untaken import SLOW_S, Untaken
from tests.unit.router.request.dispatch_world import DECODE, PROMPT, Untraced, opened
from tests.unit.router.request.world import World

Output = PromptLogprobs | Delta | ChoiceFinished
D = WorkerId("d:1", "d-1")


class FakeSession:
    """Has all its output at once: its writer is slow."""

    is_under_way = True
    decode_worker = D
    model_digest = "a"

    def __init__(self, output: list[Output]) -> None:
        self._output = output
        self.front: bool | None = None  # None: it was not started
        self._error: SlowClientError | None = None

    def start(self, *, front: bool = False) -> None:
        self.front = front

    def poll(self) -> Output | None:
        if self._error is not None:
            raise self._error
        return self._output.pop(0) if self._output else None

    def close(self) -> None:
        self._output = []

    def give_up(self, why: str) -> None:
        self._error = SlowClientError(why)

    def keep_model(self) -> str:
        return self.model_digest


def making(*sessions: FakeSession) -> MakeSession:

    def make(
        index: int, beside: WorkerId | None, model_digest: str, on_output: Callable[[], None]
    ) -> Session:
        assert (beside, model_digest) == ((D, "a") if index else (None, ""))
        return cast("Session", sessions[index])

    return make


def make_choices(*sessions: FakeSession) -> Choices:
    return Choices(len(sessions), making(*sessions))


def told(position: int) -> PromptLogprobs:
    return PromptLogprobs(position, (TokenLogprobs(-1.0, (), ()),))


def to_proto(event: Output) -> inference_pb2.GenerateResponse:
    if isinstance(event, PromptLogprobs):
        return inference_pb2.GenerateResponse(prompt_logprobs=event.to_proto())
    assert isinstance(event, Delta)
    delta = inference_pb2.Delta(
        choice=event.choice, token_ids=event.token_ids, position=event.position
    )
    return inference_pb2.GenerateResponse(delta=delta)


async def test_all_that_is_told_of_the_prompt_comes_before_any_choice_has_a_token() -> None:
    """A long prompt's parts wait together for a slow writer, as do the tokens of the others."""
    end, token = ChoiceFinished(FinishReason.LENGTH), Delta("", [7], 0, [])
    first = FakeSession([told(1), told(2), told(3), token, end])
    choices = make_choices(first, FakeSession([token, end]), FakeSession([token, end]))
    came: list[Output] = []
    while (event := await choices.next_event()) is not None:
        came.append(event)
    assert came[:3] == [told(1), told(2), told(3)]
    assert came[3:6] == [token._replace(choice=index) for index in range(3)]

    reader = AnswerReader(
        inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingOptions(n=3))
    )
    reader.read(inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r")))
    chunks = [chunk for event in came[:6] if (chunk := reader.read(to_proto(event)))]
    assert [len(chunk.prompt_logprobs) for chunk in chunks] == [3, 0, 0]


async def test_only_the_first_choice_can_be_turned_away() -> None:
    """Of the others one would end an answer that is being streamed."""
    sessions = [FakeSession([Delta("", [7], 0, [])]) for _ in range(3)]
    choices = make_choices(*sessions)
    choices.start()
    assert [session.front for session in sessions] == [False, None, None]
    await choices.next_event()
    assert [session.front for session in sessions] == [False, True, True]


class RealChoices:
    """Two, on one decode worker, of which the first runs there and has no token yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
        self._monkeypatch, self._tokenizer = monkeypatch, tokenizer
        monkeypatch.setattr(LeastLoaded, "place", lambda *_: DecodeOnly(DECODE, Why.CHOICE))
        self.world, self.sessions = opened(monkeypatch), list[Session]()
        self.world.welcomes(DECODE)
        self.serve("a")
        self.choices = Choices(2, self._make)
        self.choices.start()
        self.world.services.room.pump()
        reserved = decode_pb2.Reserved(sequence_id=1)
        self.sessions[0].on_decode_event(decode_pb2.DecodeEvent(reserved=reserved))

    def serve(self, model_digest: str) -> None:
        self._monkeypatch.setattr(Cluster, "model_digest", model_digest)

    def _make(
        self, index: int, beside: WorkerId | None, model_digest: str, on_output: Callable[[], None]
    ) -> Session:
        request = ResolvedRequest(
            shape=RequestShape(prompt_ids=PROMPT, max_tokens=4),
            sampling=SamplingParams(max_tokens=4, seed=1),
        ).choice(index, model_digest)
        answer = ResponseBuilder(
            request.shape,
            Detokenizer(self._tokenizer),
            received_s=0.0,
            clock=lambda: 1.0,
            max_unsent=9,
        )
        session = Session(
            "r",
            request,
            answer,
            Untraced(),
            self.world.services,
            deadline_s=None,
            on_failed=lambda: None,
            on_output=on_output,
            beside=beside,
        )
        self.sessions.append(session)
        return session


async def ends_with_changed_model(choices: Choices) -> None:
    with pytest.raises(ModelChangedError, match=r"digest b is served now; .* digest a:"):
        await choices.next_event()
    choices.close()


async def test_all_choices_are_of_the_first_ones_weights(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """Though they have no token yet when others are served: the answer was said to be of these."""
    real = RealChoices(monkeypatch, tokenizer)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ends_with_changed_model(real.choices))
        await asyncio.sleep(0)
        assert len(real.sessions) == 2
        real.serve("b")
        real.world.services.room.pump()
    assert real.choices.model_digest == "a"


async def test_the_first_keeps_to_its_weights_once_the_others_begin(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """They may have tokens of these before it has one."""
    real = RealChoices(monkeypatch, tokenizer)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ends_with_changed_model(real.choices))
        await asyncio.sleep(0)
        real.world.services.room.pump()
        real.serve("b")
        real.sessions[0].on_reservation_lost(1, "gone")
    assert real.choices.model_digest == "a"


@pytest.mark.parametrize("front", [False, True])
def test_who_may_not_be_turned_away_waits_where_nobody_else_may(front: bool) -> None:
    world = World()
    world.is_full = True
    world.on(events.Begin(front))
    assert world.log == [actions.Enqueue(front)]


def drawn(*logprobs: float, reason: FinishReason = FinishReason.STOP) -> FakeSession:
    """One answer, a token for each."""
    deltas: list[Output] = [
        Delta("a", [7], position, [], (TokenLogprobs(logprob, (), ()),))
        for position, logprob in enumerate(logprobs)
    ]
    return FakeSession([*deltas, ChoiceFinished(reason, 7)])


async def best(*sessions: FakeSession, num_best: int, tells_logprobs: bool = True) -> list[Output]:
    choices = BestChoices(
        len(sessions), making(*sessions), num_best=num_best, tells_logprobs=tells_logprobs
    )
    came: list[Output] = []
    while (event := await choices.next_event()) is not None:
        came.append(event)
    return came


async def test_the_best_are_those_of_the_highest_mean_and_the_best_comes_first() -> None:
    """A long one is not worse for its length; of two alike the first counts."""
    long = drawn(-1.0, -1.0, -1.0, -1.0, reason=FinishReason.LENGTH)
    came = await best(drawn(-2.0), long, drawn(-1.5, -0.5), drawn(-0.5), num_best=3)
    ends = [event for event in came if isinstance(event, ChoiceFinished)]
    assert [(end.choice, end.reason) for end in ends] == [
        (0, FinishReason.STOP),
        (1, FinishReason.LENGTH),
        (2, FinishReason.STOP),
    ]
    deltas = [event for event in came if isinstance(event, Delta)]
    assert [delta.choice for delta in deltas] == [0, 1, 1, 1, 1, 2, 2]
    assert [delta.logprobs[0].logprob for delta in deltas] == [-0.5, -1, -1, -1, -1, -1.5, -0.5]
    assert came.index(ends[0]) < came.index(deltas[1])


async def test_what_is_told_of_the_prompt_does_not_wait_for_the_best() -> None:
    impossible = drawn(-math.inf)
    impossible._output.insert(0, told(1))
    came = await best(impossible, drawn(-9.0), num_best=1, tells_logprobs=False)
    assert came[0] == told(1)
    (delta,) = (event for event in came if isinstance(event, Delta))
    assert (delta.token_ids, delta.choice, delta.logprobs) == ([7], 0, ())


async def test_nothing_is_told_before_the_last_has_ended() -> None:
    late = FakeSession([])
    choices = BestChoices(2, making(drawn(-1.0), late), num_best=1, tells_logprobs=True)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(choices.next_event())
        await asyncio.sleep(0)
        assert not waiting.done()
        late._output += drawn(-0.5)._output
        choices._wake()
    event = waiting.result()
    assert isinstance(event, Delta)
    assert event.logprobs[0].logprob == -0.5


@pytest.mark.parametrize("tells_logprobs", [False, True])
async def test_log_probabilities_that_nobody_is_told_are_not_kept(tells_logprobs: bool) -> None:
    """Of sixteen choices of a long context they would be hundreds of megabytes."""
    session = drawn(-1.0, -2.0)
    session._output.pop()
    choices = BestChoices(
        2, making(session, FakeSession([])), num_best=1, tells_logprobs=tells_logprobs
    )
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(choices.next_event())
        await asyncio.sleep(0)
        kept = [delta.logprobs for delta in choices._drawn[0].deltas]
        assert list(map(len, kept)) == [int(tells_logprobs)] * 2
        assert choices._drawn[0].mean_logprob == -1.5
        waiting.cancel()


async def test_a_long_answer_that_may_be_the_best_is_kept_as_few_deltas() -> None:
    """As one for each token, those of sixteen choices of a long context were most of a gigabyte."""
    num_tokens = 1000
    deltas = [
        Delta(f"{at} ", [at], at, [at / 2], (TokenLogprobs(-1.0, (), ()),), reasoning=f"{-at} ")
        for at in range(num_tokens)
    ]
    rest = Delta("end", [], num_tokens, [])
    session = FakeSession([*deltas, rest, ChoiceFinished(FinishReason.STOP, 7)])
    came = await best(session, drawn(-2.0), num_best=1, tells_logprobs=False)
    told = [event for event in came if isinstance(event, Delta)]
    assert len(told) < num_tokens / 10
    assert [each for delta in told for each in delta.token_ids] == list(range(num_tokens))
    assert [each for delta in told for each in delta.margins] == [at / 2 for at in range(1000)]
    assert all(delta.position == delta.token_ids[0] for delta in told if delta.token_ids)
    assert "".join(delta.text for delta in told) == "".join(each.text for each in deltas) + "end"
    assert "".join(delta.reasoning for delta in told) == "".join(each.reasoning for each in deltas)
    assert not any(delta.logprobs for delta in told)


async def test_two_alike_are_alike_however_many_tokens_came_at_once() -> None:
    logprobs = [-0.1 * number for number in range(1, 30)]
    told = tuple(TokenLogprobs(each, (), ()) for each in logprobs)
    at_once = Delta("b", [7] * len(told), 0, [], told)
    end = ChoiceFinished(FinishReason.STOP, 7)
    batches = Delta("c", [7] * 9, 0, [], told[:9]), Delta("c", [7] * 20, 9, [], told[9:])
    came = await best(
        drawn(*logprobs), FakeSession([at_once, end]), FakeSession([*batches, end]), num_best=3
    )
    texts = [event.text for event in came if isinstance(event, Delta)]
    assert texts == [*"a" * 29, "b", "c", "c"]


class SlowClient:
    """Has the two best of three, of so many tokens each, to take; others wait beside it."""

    def __init__(self, num_tokens: int, max_bytes: int = 2**20) -> None:
        self._now_s = 0.0
        self.untaken = Untaken(lambda: self._now_s, max_bytes)
        taker = self.untaken.open(end=lambda why: self.choices.give_up(why))
        sessions = (drawn(*[-1.0] * num_tokens) for _ in range(3))
        self.choices = BestChoices(
            3, making(*sessions), num_best=2, tells_logprobs=True, taker=taker
        )

    def pass_time(self, seconds: float) -> None:
        self._now_s += seconds


async def test_the_best_wait_for_the_client_as_other_answers_do() -> None:
    """They are whole when the first of them is told, and counted until each was written."""
    client = SlowClient(num_tokens=50)
    left: list[int] = []
    while await client.choices.next_event() is not None:
        left.append(client.untaken.num_bytes)
    assert left[0] > 100 * 128
    assert left == sorted(left, reverse=True)
    assert (len(left), len(set(left)), left[-1] > 0) == (102, 102, True)
    assert client.untaken.num_bytes == 0


async def test_the_best_that_are_not_taken_wait_no_more_once_closed() -> None:
    client = SlowClient(num_tokens=50)
    await client.choices.next_event()
    for _ in range(2):
        client.choices.close()
        assert client.untaken.num_bytes == 0


async def test_who_does_not_take_the_best_is_cut_off_where_too_much_waits() -> None:
    client = SlowClient(num_tokens=50, max_bytes=2**18)
    await client.choices.next_event()
    assert client.untaken.num_bytes < 2**16
    client.pass_time(SLOW_S)
    client.untaken.open().wait(2**16)
    assert client.untaken.num_bytes == 2**16
    with pytest.raises(SlowClientError):
        await client.choices.next_event()
    client.choices.close()
