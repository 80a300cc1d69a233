"""Reading other servers' answers, and what is made of the figures."""

import json
from collections.abc import Sequence

import httpx
import pytest

from tests.bench.peers import OpenAITarget, Reply, Scenario, line, measure, ratios, table

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
    ("response", "message"),
    [
        (httpx.Response(404, content=b"no such model"), "s: 404: .*no such model"),
        (httpx.Response(200, content=event_stream({"choices": [{}]})), "without usage"),
    ],
)
async def test_what_is_no_answer_is_an_error(response: httpx.Response, message: str) -> None:
    client = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda request: response), base_url="http://x/v1"
    )
    with pytest.raises(ValueError, match=message):
        await OpenAITarget("s", client, "m", {}).ask("text", 3)


class Scripted:
    """Answers as told: first token after 1 s, last after 2 s."""

    def __init__(self, name: str, ours: bool, num_output_tokens: int) -> None:
        self.name, self.ours = name, ours
        self._num_output_tokens = num_output_tokens

    async def ask(self, text: str, num_output_tokens: int) -> Reply:
        return Reply(10.0, 11.0, 12.0, 5, self._num_output_tokens)


async def test_ratios_are_ours_over_theirs_and_wrong_counts_are_shown() -> None:
    targets: Sequence[Scripted] = (Scripted("we", True, 3), Scripted("they", False, 2))
    rows = [await measure(target, SCENARIO, ["a", "b"]) for target in targets]
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
