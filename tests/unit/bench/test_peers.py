"""Reading other servers' answers, and what is made of the figures."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import httpx
import pytest

from tests.bench.peer_ratios import Scenario, line, ratios, table
from tests.bench.peer_servers import OpenAITarget, Reply, ServerError, UnavailableError
from tests.bench.peers import Comparison, Prompts, measure

SCENARIO = Scenario("2 at a time", num_streams=2, num_prompt_tokens=5, num_output_tokens=3)


def event_stream(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


async def test_an_answer_is_timed_and_its_tokens_counted() -> None:
    bodies = []

    def serve(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/completions"
        bodies.append(json.loads(request.content))
        content = event_stream(
            {"choices": [{"text": "a"}]},
            {"choices": [{"text": "b"}], "usage": None},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
        )
        return httpx.Response(200, content=b": alive\n\n" + content + b"data: [DONE]\n\n")

    client = httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url="http://x/v1")
    reply = await OpenAITarget("s", client, "m", {"ignore_eos": True}).ask("text", 3)
    assert (reply.num_prompt_tokens, reply.num_output_tokens) == (5, 3)
    assert reply.sent_s <= reply.first_s <= reply.last_s
    (body,) = bodies
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", "text", 3)
    assert body["ignore_eos"]


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (httpx.Response(404, content=b"no such model"), ServerError, "s: 404: .*no such model"),
        (httpx.Response(503, content=b"loading"), UnavailableError, "s: 503: .*loading"),
        (
            httpx.Response(200, content=event_stream({"choices": [{}]})),
            ServerError,
            "without usage",
        ),
    ],
)
async def test_what_is_no_answer_is_an_error(
    response: httpx.Response, kind: type[ServerError], message: str
) -> None:
    client = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda request: response), base_url="http://x/v1"
    )
    with pytest.raises(ServerError, match=message) as caught:
        await OpenAITarget("s", client, "m", {}).ask("text", 3)
    assert caught.type is kind


async def test_a_kept_connection_that_the_server_closed_is_asked_again() -> None:
    num_asked = 0

    def serve(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise httpx.RemoteProtocolError("disconnected without sending a response")
        usage = {"prompt_tokens": 5, "completion_tokens": 3}
        return httpx.Response(200, content=event_stream({"choices": [{}]}, {"usage": usage}))

    client = httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url="http://x/v1")
    reply = await OpenAITarget("s", client, "m", {}).ask("text", 3)
    assert (reply.num_output_tokens, num_asked) == (3, 2)


async def test_every_length_is_warmed_up() -> None:
    class Words(Prompts):
        def __init__(self) -> None: ...

        def text(self, num_tokens: int) -> str:
            return "word " * num_tokens

    class Asked(Scripted):
        lengths: ClassVar[list[int]] = []

        async def ask(self, text: str, num_output_tokens: int) -> Reply:
            self.lengths.append(len(text.split()))
            return await super().ask(text, num_output_tokens)

    long = Scenario("long prompt", num_streams=1, num_prompt_tokens=2048, num_output_tokens=1)
    await Comparison([], [SCENARIO, long], Words()).warm_up(Asked("s", 3))
    assert Asked.lengths[:2] == [SCENARIO.num_prompt_tokens, 2048]
    assert len(Asked.lengths) == 2 + SCENARIO.num_streams


class Scripted:
    """Answers as told: first token after 1 s, last after 2 s."""

    def __init__(self, name: str, num_output_tokens: int) -> None:
        self.name = name
        self._num_output_tokens = num_output_tokens

    async def ask(self, text: str, num_output_tokens: int) -> Reply:
        return Reply(10.0, 11.0, 12.0, 5, self._num_output_tokens)


async def test_ratios_are_ours_over_theirs_and_wrong_counts_are_shown() -> None:
    targets: Sequence[Scripted] = (Scripted("we", 3), Scripted("they", 2))
    rows = [{"round": 0, **await measure(target, SCENARIO, ["a", "b"])} for target in targets]
    assert rows[0]["output_tokens_per_s"] == pytest.approx(2 * 3 / 2.0)
    assert rows[0]["ttft_s"] == pytest.approx(1.0)
    assert rows[0]["decode_tokens_per_s"] == pytest.approx(2.0)
    (ratio,) = ratios(rows, [SCENARIO], ["we"])
    assert (ratio["ours"], ratio["theirs"]) == ("we", "they")
    assert ratio["ratio"] == pytest.approx(1.5)
    shown = table(rows, [SCENARIO], ["we"])
    assert "we x1.50" in shown
    assert "token counts differ from what was asked: they (2 at a time)" in shown
    assert "tokens [5, 5] [2, 2]" in line(rows[1])
    assert "tokens [5, 5]" not in line(rows[0])


def row(number: int, target: str, speed: float) -> dict[str, Any]:
    return {
        "round": number,
        "target": target,
        "scenario": SCENARIO.name,
        "output_tokens_per_s": speed,
        "ttft_s": 1.0,
        "exact": True,
        "machine": {"others_cores": 0.1 * number},
    }


def test_ratios_are_of_medians_and_the_least_of_them_is_over_the_best() -> None:
    speeds = {"we": [10.0, 30.0, 20.0], "slow": [5.0, 5.0, 5.0], "fast": [10.0, 15.0, 16.0]}
    rows = [row(n, name, each[n]) for n in range(3) for name, each in speeds.items()]
    compared = {each["theirs"]: each for each in ratios(rows, [SCENARIO], ["we"])}
    assert compared["slow"]["ratio"] == pytest.approx(20 / 5)
    assert compared["fast"]["ratio"] == pytest.approx(20 / 15)
    assert compared["fast"]["by_round"] == pytest.approx([1.0, 2.0, 1.25])
    shown = table(rows, [SCENARIO], ["we"])
    assert "we over the best, fast: x1.33 (by round 1.00, 2.00, 1.25)" in shown
    assert "used 0.10 cores meanwhile, at most 0.20" in shown


def test_a_server_that_failed_in_a_round_is_compared_in_the_others() -> None:
    rows = [row(0, "we", 20.0), row(1, "we", 10.0), row(1, "they", 10.0)]
    (ratio,) = ratios(rows, [SCENARIO], ["we"])
    assert ratio["by_round"] == pytest.approx([1.0])
