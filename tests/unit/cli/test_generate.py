"""What ``diptych generate`` asks for."""

import pytest

from diptych import settings
from diptych.cli.generate import GenerateConfig
from diptych.errors import ConfigurationError, InvalidRequestError
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
        "--seed", "3", "--ignore-eos",
    ).sampling  # fmt: skip
    assert (asked.temperature, asked.seed, asked.ignore_eos) == (0.5, 3, True)
    assert (list(asked.stop), list(asked.stop_token_ids)) == (["a", "b"], [7])


@pytest.mark.parametrize("args", [(), ("a", "--chat", "b"), ("--prompt", "a", "--system", "b")])
def test_there_is_one_prompt(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError):
        request(*args)


def test_a_value_out_of_range_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request("a", "--seed", str(2**64))
    assert caught.value.field == "sampling.seed"
