"""What ``diptych generate`` asks for."""

from typing import Any

import pytest

from diptych import settings
from diptych.cli import generate
from diptych.cli.generate import GenerateConfig
from diptych.client import Chunk
from diptych.errors import ConfigurationError, InvalidRequestError
from diptych.request_class import RequestClass
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.v1 import inference_pb2


def request(*args: str, has_chat_template: bool = True) -> inference_pb2.GenerateRequest:
    config = settings.load(
        GenerateConfig, args, prog="diptych generate", env_prefix="DIPTYCH_GENERATE_"
    )
    return config.request(has_chat_template=has_chat_template)


def test_a_plain_argument_is_said_to_the_model() -> None:
    asked = request("Hello", "--system", "Be brief.")
    turns = [(turn.role, turn.content[0].text) for turn in asked.chat.messages]
    assert turns == [("system", "Be brief."), ("user", "Hello")]
    assert asked.sampling.ListFields() == [], "the model's makers and the router decide"


def test_without_a_chat_template_it_is_continued() -> None:
    assert request("Hello", has_chat_template=False).text == "Hello"
    assert request("--prompt", "Hello").text == "Hello"


def test_flags_become_options() -> None:
    asked = request(
        "Hello", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--stop-token-ids", "7",
        "--seed", "3", "--ignore-eos", "--min-p", "0.5", "--logit-bias", "7=1.5",
        "--logit-bias", "8=-2",
    ).sampling  # fmt: skip
    assert (asked.temperature, asked.seed, asked.ignore_eos) == (0.5, 3, True)
    assert (asked.min_p, dict(asked.logit_bias)) == (0.5, {7: 1.5, 8: -2.0})
    assert (list(asked.stop), list(asked.stop_token_ids)) == (["a", "b"], [7])


def test_a_handoff_is_expected_of_what_only_a_prefill_worker_can_do() -> None:
    """Whatever the router makes of the prompt's length, and of objectives."""
    assert request("Hello", "--expect-handoff").sampling.prompt_logprobs == 0
    assert request("Hello", "--expect-handoff").sampling.HasField("prompt_logprobs")
    assert not request("Hello").sampling.HasField("prompt_logprobs")


def test_texts_are_as_they_are_given() -> None:
    """No list that is parted at commas, trimmed, or read as JSON: a line's end may be a stop."""
    odd = ["\n", "a, b", " c ", "[INST]", '"', "{", "7", "true", "None", "\\n"]
    flags = [part for each in odd for part in ("--stop", each)]
    config: Any = settings.load(
        GenerateConfig,
        ["Hello", *flags, "--bad-words= x,y", "--choice", "yes, please", "--choice=-"],
        prog="diptych generate",
        env_prefix="DIPTYCH_GENERATE_",
    )
    assert config.stop == odd
    assert (config.bad_words, config.choice) == ([" x,y"], ["yes, please", "-"])
    with pytest.raises(ConfigurationError, match="--stop: expected one argument"):
        request("Hello", "--stop", "--seed", "3")
    assert request("--seed", "3", "--", "--stop").chat.messages[0].content[0].text == "--stop"


@pytest.mark.parametrize("word", ["None", "null", "true", "1e5", "{}", ""])
def test_a_word_that_means_something_elsewhere_is_a_text(word: str) -> None:
    said = request(word, "--system", word).chat.messages
    assert [turn.content[0].text for turn in said] == [word, word]
    assert request(f"--prompt={word}").text == word


@pytest.mark.parametrize("name", ["json_schema", "regex", "grammar"])
def test_an_empty_constraint_is_refused(name: str) -> None:
    """As a shell has it of a file that is missing."""
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        request("Hello", f"{flag}=")
    assert caught.value.field == f"sampling.constraint.{name}"
    assert getattr(request("Hello", flag, "None").sampling.constraint, name) == "None"


def test_a_service_level_goes_with_the_request() -> None:
    level = ("--priority", "batch", "--ttft-ms", "500", "--tpot-ms", "40.5")
    for args in (("Hello", *level), ("--prompt", "Hello", *level)):
        assert ServiceLevel.of(request(*args)) == ServiceLevel(RequestClass.BATCH, 500, 40.5)
    assert ServiceLevel.of(request("Hello")) == NO_LEVEL
    with pytest.raises(InvalidRequestError) as caught:
        request("Hello", "--ttft-ms", "0")
    assert caught.value.field == "ttft_ms"


@pytest.mark.parametrize("args", [(), ("a", "--chat", "b"), ("--prompt", "a", "--system", "b")])
def test_there_is_one_prompt(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError):
        request(*args)


def test_a_value_out_of_range_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request("a", "--seed", str(2**64))
    assert caught.value.field == "sampling.seed"


def timing(
    path: inference_pb2.KVPath, num_bytes: int, num_computed: int | None = 0
) -> inference_pb2.Timing:
    made = inference_pb2.Timing(kv_path=path, prefill_worker="p:1", decode_worker="d:2")
    if num_computed is not None:
        made.num_computed_prompt_tokens = num_computed
    made.transfer.num_bytes = num_bytes
    return made


@pytest.mark.parametrize(
    ("answered", "code", "said"),
    [
        (timing(inference_pb2.KV_PATH_DISAGGREGATED, 64), 0, ""),
        (timing(inference_pb2.KV_PATH_DISAGGREGATED, 0), 1, "prefilled on p:1, KV pulled"),
        (
            timing(inference_pb2.KV_PATH_DISAGGREGATED, 64, 5),
            1,
            "prompt tokens computed on the decode worker: 5",
        ),
        (timing(inference_pb2.KV_PATH_DISAGGREGATED, 64, None), 1, "KV pulled, decoded on d:2"),
        (timing(inference_pb2.KV_PATH_LOCAL, 0), 1, "prefilled and decoded on d:2"),
        (timing(inference_pb2.KV_PATH_RECOMPUTED, 64), 1, "computed again on d:2"),
        (None, 1, "unknown path"),
    ],
)
def test_a_handoff_that_was_expected_and_did_not_happen_is_a_failure(
    answered: inference_pb2.Timing | None,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def answer(config: Any, trace: Any) -> Chunk:
        return Chunk(request_id="r", model="m", seed=1, timing=answered)

    monkeypatch.setattr(generate, "_generate", answer)
    assert generate.run(["Hello"]) == 0, "nothing was expected"
    assert generate.run(["Hello", "--expect-handoff"]) == code
    assert said in capsys.readouterr().err
