"""What the lines of a chat do that begin with a slash, and what is asked for after them."""

import pytest

from diptych.cli.chat_commands import obey
from diptych.cli.conversation import Conversation
from diptych.cli.sampling_flags import FLAGS
from diptych.client import Chunk, SamplingOptions
from diptych.errors import InvalidRequestError
from diptych.v1 import inference_pb2


@pytest.fixture
def conversation() -> Conversation:
    return Conversation("m", "", SamplingOptions(temperature=0.5))


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    messages = conversation.request("now").chat.messages
    return [(turn.role, turn.content[0].text) for turn in messages]


def test_what_was_said_is_sent_again(conversation: Conversation) -> None:
    assert turns(conversation) == [("user", "now")]
    conversation.answered("a", "b", None)
    conversation.answered("nothing came", "", None)
    obey(conversation, "/system Be brief.")
    assert turns(conversation) == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "now"),
    ]
    obey(conversation, "/clear")
    assert turns(conversation) == [("system", "Be brief."), ("user", "now")]
    obey(conversation, "/system")
    assert turns(conversation) == [("user", "now")]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0", "temperature", 0.0),
        ("/set max-tokens 12", "max_tokens", 12),
        ("/set ignore_eos on", "ignore_eos", True),
        ("/set stop a 'b c'", "stop", ("a", "b c")),
        ("/set stop_token_ids 7 8", "stop_token_ids", (7, 8)),
        ("/set logit_bias 7=1.5 8=-2", "logit_bias", {7: 1.5, 8: -2.0}),
        ("/set temperature", "temperature", None),
    ],
)
def test_an_option_is_set_by_its_declaration(
    conversation: Conversation, line: str, name: str, value: object
) -> None:
    (said,) = obey(conversation, line)
    assert said.startswith(f"{name} is ")
    assert getattr(conversation.options, name) == value
    sent = conversation.request("now").sampling
    assert sent.HasField("temperature") == (line != "/set temperature")


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("/set temperature 101", "sampling.temperature"),
        ("/set temperature warm", "temperature"),
        ("/set max_tokens 1.5", "max_tokens"),
        ("/set logit_bias seven", "logit_bias"),
        ("/set warmth 1", "warmth"),
        ("/set return_margins on", "return_margins"),
        ("/set stop 'a", "/set"),
        ("/sett temperature 1", "/sett"),
        ("/", "/"),
    ],
)
def test_what_cannot_be_done_is_named_and_changes_nothing(
    conversation: Conversation, line: str, field: str
) -> None:
    before = conversation.options
    with pytest.raises(InvalidRequestError) as caught:
        obey(conversation, line)
    assert caught.value.field == field
    assert "\n" not in caught.value.message
    assert conversation.options is before


def test_options_are_listed_with_their_values(conversation: Conversation) -> None:
    lines = obey(conversation, "/set")
    assert [line.split()[0] for line in lines] == list(FLAGS)
    assert lines[0].split()[:2] == ["temperature", "0.5"]
    assert all(line.split()[1] in {"unset", "0", "False"} for line in lines[1:])


def test_stats_are_those_of_the_last_answer_that_ended(conversation: Conversation) -> None:
    (none,) = obey(conversation, "/stats")
    assert "there is no answer" in none
    last = Chunk(
        request_id="r", model="m", seed=1, usage=inference_pb2.Usage(num_output_tokens=3),
        timing=inference_pb2.Timing(ttft_s=1.0, total_s=2.0),
    )  # fmt: skip
    conversation.answered("a", "b", last)
    assert any(line.startswith("TTFT") for line in obey(conversation, "/stats"))
    conversation.answered("a", "stopped", None)
    assert obey(conversation, "/stats") == [none]
    conversation.answered("a", "b", last)
    obey(conversation, "/clear")
    assert obey(conversation, "/stats") == [none]


def test_help_names_every_command(conversation: Conversation) -> None:
    lines = obey(conversation, "/help")
    named = [line.split()[0] for line in lines]
    assert named == ["/set", "/system", "/clear", "/stats", "/help", "/exit", "//TEXT"]
