"""What a tokenizer reads from a model folder."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, processors
from tokenizers import Tokenizer as HFTokenizer

from diptych.errors import ConfigurationError, InvalidRequestError
from diptych.text.chat_template import Message, Tool
from diptych.text.inert import MarkedText
from diptych.text.tokenizer import Tokenizer
from tests.text_models import (
    SAMPLES,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    write_folder,
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_folder(tmp_path_factory.mktemp("byte-level"), byte_level_tokenizer())


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_folder(tmp_path_factory.mktemp("pieces"), sentencepiece_tokenizer())


def test_what_the_folder_says(byte_level: Tokenizer) -> None:
    assert byte_level.max_model_len == 128
    assert byte_level.vocab_size == byte_level_tokenizer().get_vocab_size()
    assert byte_level.bos_token_id == 0
    assert byte_level.special_token_ids == {0, 1}


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_every_token_can_be_spelt(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = "hello 😀"
    spelt = b"".join(map(tokenizer.text.spelling, tokenizer.encode(text, add_special=False)))
    assert spelt.decode().strip() == text
    assert "</s>" in {tokenizer.text.spelling(i).decode() for i in tokenizer.special_token_ids}
    assert tokenizer.text.spelling(10**6) == b""


def test_end_tokens_are_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    tokenizer = write_folder(tmp_path, byte_level_tokenizer())
    assert tokenizer.eos_token_ids == {7, 9, 2, 1}  # generation, config, tokenizer ("</s>")


@pytest.mark.parametrize("text", SAMPLES)
def test_text_survives_a_round_trip(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


@pytest.mark.parametrize("in_template", [False, True])
@pytest.mark.parametrize("wanted", [None, False, True])
def test_add_bos_token_overrules(tmp_path: Path, in_template: bool, wanted: bool | None) -> None:
    raw = byte_level_tokenizer()
    if in_template:
        raw.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    settings = {} if wanted is None else {"add_bos_token": wanted}
    tokenizer = write_folder(tmp_path, raw, **settings)
    bos = [0] if (in_template if wanted is None else wanted) else []
    plain = tokenizer.encode("Hello", add_special=False)
    assert tokenizer.encode("Hello") == [*bos, *plain]
    assert tokenizer.encode("") == bos
    assert tokenizer.encode("<s>", add_special=False) == [0]


@pytest.mark.parametrize("in_template", [False, True])
@pytest.mark.parametrize("wanted", [None, False, True])
def test_add_eos_token_adds(tmp_path: Path, in_template: bool, wanted: bool | None) -> None:
    raw = byte_level_tokenizer()
    around = "<s> $A </s>" if in_template else "<s> $A"
    raw.post_processor = processors.TemplateProcessing(around, None, [("<s>", 0), ("</s>", 1)])
    settings = {} if wanted is None else {"add_eos_token": wanted}
    tokenizer = write_folder(tmp_path, raw, **settings)
    plain = tokenizer.encode("Hello", add_special=False)
    ends = [1] if in_template or wanted else []
    assert tokenizer.encode("Hello") == [0, *plain, *ends]
    assert tokenizer.encode("Hello", is_continued=True) == [0, *plain]
    assert 1 not in plain
    chat = tokenizer.encode_chat(MarkedText("Hello"))
    assert chat == plain


def test_no_end_is_added_where_none_is_named(tmp_path: Path) -> None:
    settings = {"add_eos_token": True, "eos_token": None}
    tokenizer = write_folder(tmp_path, byte_level_tokenizer(), **settings)
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_special=False)


def test_one_token_may_begin_and_end_texts(tmp_path: Path) -> None:
    raw = byte_level_tokenizer()
    raw.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    settings = {"bos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = write_folder(tmp_path, raw, **settings)
    plain = tokenizer.encode("Hello", add_special=False)
    assert tokenizer.encode("Hello") == [1, *plain, 1]


def test_chat_prompts_are_the_templates_text(byte_level: Tokenizer) -> None:
    messages = [Message("user", "Hello")]
    text = "<s>user: Hello</s>\n<s>assistant: "
    assert byte_level.render_chat(messages) == (text, ())
    ids = byte_level.encode_chat(byte_level.render_chat(messages))
    assert ids == byte_level.encode(text, add_special=False)
    assert ids[0] == 0
    assert ids.count(1) == 1


def test_a_template_file_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = write_folder(tmp_path, byte_level_tokenizer(), chat_template=named)
    assert tokenizer.render_chat([]).text == "yes"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert Tokenizer.from_folder(tmp_path).render_chat([]).text == "file </s>"


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
)
def test_a_template_that_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, byte_level_tokenizer(), chat_template="yes")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / name).write_bytes(b"caf\xe9")
    with pytest.raises(ConfigurationError, match=name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("named", [["yes"], [{"name": "default"}], [{"name": [], "template": ""}]])
def test_templates_without_names_are_named_by_their_file(tmp_path: Path, named: object) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json: chat_template"):
        write_folder(tmp_path, byte_level_tokenizer(), chat_template=named)


def test_chats_with_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    """Named so, or in a file of that name; what it has is seen by who asks for the source."""
    with_tools = "{{ tools[0].function.name }}"
    named = [{"name": "default", "template": "plain"}]
    tokenizer = write_folder(tmp_path, byte_level_tokenizer(), chat_template=named)
    with pytest.raises(InvalidRequestError, match="knows none"):
        tokenizer.render_chat([], tools=[Tool("clock")])
    named.append({"name": "tool_use", "template": with_tools})
    (tmp_path / "two").mkdir()
    told = [write_folder(tmp_path / "two", byte_level_tokenizer(), chat_template=named)]
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text(with_tools)
    told.append(Tokenizer.from_folder(tmp_path))
    for each in told:
        assert each.render_chat([]).text == "plain"
        assert each.render_chat([], tools=[Tool("clock")]).text == "clock"
        assert each.chat_template is not None
        assert each.chat_template.source == f"plain{with_tools}"


def test_no_template(tmp_path: Path) -> None:
    tokenizer = write_folder(tmp_path, byte_level_tokenizer(), chat_template=None)
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.render_chat([Message("user", "Hello")])


@given(text=st.text(max_size=200))
def test_min_tokens_is_a_lower_bound(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text))
    assert byte_level.min_tokens("x" * 10_000) > byte_level.max_model_len


async def test_an_event_loop_goes_on_while_a_thread_tokenises(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_tokenizer())
    tokenizer = Tokenizer(tmp_path, inert_contents=True)
    turns = 0

    def turns_during(encode: Callable[[], list[int]]) -> int:
        before = turns
        assert encode()
        return turns - before

    text = "<a" * 100_000
    for encode in (
        partial(tokenizer.encode, text),
        partial(tokenizer.encode_chat, MarkedText(text)),
    ):
        encoding = asyncio.get_running_loop().run_in_executor(None, turns_during, encode)
        while not encoding.done():
            turns += 1
            await asyncio.sleep(0.001)
        assert await encoding > 20, "more than the interpreter lets it have between two calls"


@pytest.mark.parametrize("text", ["hello  world", "é😀漢 b", "<s>hello</s>", " "])
def test_a_tokenizer_of_unigrams_is_read(tmp_path: Path, text: str) -> None:
    """As those of llm-jp are: with bytes for what no piece says."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"dehlorw"]
    raw = HFTokenizer(models.Unigram([(each, -1.0) for each in pieces], 0, True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = write_folder(tmp_path, raw)
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids, skip_special=False) == text
    assert tokenizer.min_tokens(text * 10_000) <= len(token_ids) * 10_000


def test_an_added_token_of_long_characters_is_as_long_as_its_bytes(tmp_path: Path) -> None:
    """As DeepSeek's are."""
    raw, text = byte_level_tokenizer(), "｜" * 64
    assert max(map(len, raw.get_vocab())) <= len(text)
    raw.add_tokens([text])
    tokenizer = write_folder(tmp_path, raw)
    assert len(tokenizer.encode(text * 30, add_special=False)) == 30
    assert 0 < tokenizer.min_tokens(text * 30) <= 30


def test_no_bound_where_text_may_shrink(tmp_path: Path) -> None:
    raw = byte_level_tokenizer()
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    assert write_folder(tmp_path, raw).min_tokens("x" * 10_000) == 0


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [(Regex(" {2,}"), "▁", " " * 10_000), ("a very long one", "h", "a very long one" * 99)],
)
@pytest.mark.parametrize("kind", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_what_becomes_less_has_no_more_tokens_than_that(
    tmp_path: Path, kind: Callable[[], HFTokenizer], old: str | Regex, new: str, text: str
) -> None:
    raw = kind()
    raw.normalizer = normalizers.Sequence(
        [normalizers.Replace(old, new), normalizers.Replace(" ", "▁")]
    )
    tokenizer = write_folder(tmp_path, raw)
    assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text))


def test_settings_of_a_text_and_image_model(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_tokenizer())
    inner = {"max_position_embeddings": 77, "vocab_size": 500}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner}))
    assert Tokenizer.from_folder(tmp_path).max_model_len == 77
    (tmp_path / "config.json").write_text(json.dumps({"text_config": [inner]}))
    with pytest.raises(ConfigurationError, match="text_config must be an object"):
        Tokenizer.from_folder(tmp_path)


def test_a_text_part_that_leaves_counts_to_transformers(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_tokenizer())
    content = {
        "model_type": "gemma3",
        "eos_token_id": [3],
        "text_config": {"model_type": "gemma3_text"},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.max_model_len == 131072
    assert tokenizer.vocab_size == 262208
    assert 3 in tokenizer.eos_token_ids


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    write_folder(tmp_path, byte_level_tokenizer())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", 2.0, True, -1, 10**6, 2**70, [2, -1], [None], {"id": 2}])
def test_an_end_that_is_no_token_is_named(tmp_path: Path, name: str, value: object) -> None:
    write_folder(tmp_path, byte_level_tokenizer())
    change(tmp_path / name, "eos_token_id", value)
    with pytest.raises(ConfigurationError) as caught:
        Tokenizer.from_folder(tmp_path)
    message = caught.value.message
    assert f"{name}: eos_token_id" in message
    assert message.endswith(f"is {value!r}")
    assert "\n" not in message


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, 10**6])
def test_a_begin_that_is_no_token_is_named(tmp_path: Path, value: object) -> None:
    write_folder(tmp_path, byte_level_tokenizer())
    change(tmp_path / "tokenizer_config.json", "bos_token", None)
    change(tmp_path / "config.json", "bos_token_id", value)
    with pytest.raises(ConfigurationError, match=r"config\.json: bos_token_id must be of tokens"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", ["many", 512.5, True, 0, -1, [512], 2**31])
def test_a_count_that_is_none_is_named(tmp_path: Path, key: str, value: object) -> None:
    write_folder(tmp_path, byte_level_tokenizer())
    change(tmp_path / "config.json", key, value)
    with pytest.raises(ConfigurationError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert f"config.json: {key} must be" in caught.value.message
    assert caught.value.message.endswith(f"is {value!r}")


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "pad_token"])
@pytest.mark.parametrize("said", [["</s>"], False, {"content": 5}])
def test_a_special_token_that_is_no_text_is_told_by_its_field(
    tmp_path: Path, role: str, said: object
) -> None:
    with pytest.raises(ConfigurationError, match=rf"_config\.json: {role} .* is ") as caught:
        write_folder(tmp_path, byte_level_tokenizer(), **{role: said})
    assert "\n" not in caught.value.message


def test_a_tokenizer_that_has_no_tokens_for_a_letter_is_named(tmp_path: Path) -> None:
    raw = HFTokenizer(models.Unigram([(each, -1.0) for each in "bcd"], None, False))
    raw.decoder = decoders.Metaspace()
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json: it has no tokens for 'a'"):
        write_folder(tmp_path, raw)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    ],
    ids=["when it is read", "at a text"],
)
def test_a_tokenizer_at_which_the_library_panics_is_named(
    tmp_path: Path, part: str, value: object
) -> None:
    write_folder(tmp_path, byte_level_tokenizer())
    change(tmp_path / "tokenizer.json", part, value)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json: .") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in caught.value.message


def test_who_is_interrupted_while_a_tokenizer_is_read_is_not_told_that_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: str) -> HFTokenizer:
        raise KeyboardInterrupt

    write_folder(tmp_path, byte_level_tokenizer())
    reading = "diptych.text.tokenizer.HFTokenizer"
    monkeypatch.setattr(reading, SimpleNamespace(from_file=interrupted))
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.from_folder(tmp_path)


def change(path: Path, key: str, value: object) -> None:
    """Set one key of a JSON file, which need not be there."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {key: value}))
