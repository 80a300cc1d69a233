"""What the lines of a chat do that begin with a slash, and what is asked for after them."""

import errno
import json
from pathlib import Path

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


def test_a_save_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(
    conversation: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (path := tmp_path / "chat.json").write_text("before")
    conversation.answered("a", "b", None)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(InvalidRequestError, match="No space"):
            obey(conversation, f"/save {path}")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("chat.json", "before")
    ]


def test_a_save_changes_no_other_file(conversation: Conversation, tmp_path: Path) -> None:
    (other := tmp_path / "chat.json.new").write_text("another's")
    conversation.answered("a", "b", None)
    obey(conversation, f"/save {tmp_path / 'chat.json'}")
    assert other.read_text() == "another's"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["chat.json", other.name]
    (link := tmp_path / "link.json").symlink_to("kept.json")
    for _ in range(2):
        obey(conversation, f"/save {link}")
        assert link.is_symlink()
    assert (tmp_path / "kept.json").read_text() == (tmp_path / "chat.json").read_text()


def test_a_save_that_fails_removes_no_other_file(
    conversation: Conversation, tmp_path: Path
) -> None:
    (other := tmp_path / "chats.new").write_text("another's")
    (tmp_path / "chats").mkdir()
    conversation.answered("a", "b", None)
    with pytest.raises(InvalidRequestError, match="directory"):
        obey(conversation, f"/save {tmp_path / 'chats'}")
    assert other.read_text() == "another's"


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


def test_a_chat_is_kept_in_a_file(conversation: Conversation, tmp_path: Path) -> None:
    """As OpenAI's API takes it, with all that the model is told again."""
    call = inference_pb2.ToolCall(id="1", name="clock", arguments='{"is_utc": true}')
    obey(conversation, "/system Be brief.")
    conversation.answered("what time?", "", None, [call], "hm")
    conversation.call_answered(call, "nöon")
    path = tmp_path / "a chat.json"
    assert obey(conversation, f"/save {path}") == [f"4 messages are in {path}"]
    kept = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in kept] == ["system", "user", "assistant", "tool"]
    function = {"name": "clock", "arguments": '{"is_utc": true}'}
    assert kept[2]["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert kept[2]["reasoning_content"] == "hm"
    other = Conversation("m", "Be long.", conversation.options)
    other.answered("x", "y", None)
    obey(other, f"/load {path}")
    assert other.request("now") == conversation.request("now")
    path.chmod(0o600)
    obey(other, f"/save {path}")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("[]", "object"),
        ("{", "JSON"),
        ('{"messages": [{"content": "a"}]}', r"messages\.0\.role: Field required"),
    ],
)
def test_a_file_that_has_no_chat_is_refused(
    conversation: Conversation, tmp_path: Path, content: str | None, problem: str
) -> None:
    path = tmp_path / "chat.json"
    if content is not None:
        path.write_text(content)
    conversation.answered("a", "b", None)
    before = conversation.request("now")
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        obey(conversation, f"/load {path}")
    assert caught.value.field == str(path)
    odd = ("/save ~nobody-of-that-name/a", "/load ~nobody-of-that-name/a", "/save a\0", "/load a\0")
    for line in ("/load", "/save", "/save .", f"/save {tmp_path}", *odd):
        with pytest.raises(InvalidRequestError):
            obey(conversation, line)
    assert conversation.request("now") == before
    assert [each.name for each in tmp_path.iterdir()] == ["chat.json"] * (content is not None)


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
        ("/set stop_token_ids 3 -7", "sampling.stop_token_ids[1]"),
        ("/set logit_bias -7=1", "sampling.logit_bias"),
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
    commands = ["/set", "/system", "/save", "/load", "/clear", "/stats", "/help", "/exit"]
    assert named == [*commands, "//TEXT", '"""']
