"""Requests as clients send them, and the model that they are asked of."""

from typing import Any

from diptych.sampling_params import (
    NOTHING_SAID,
    SamplingOptions,
)
from diptych.v1 import inference_pb2
from router.frontend import public_messages
from router.frontend.validation import ModelFacts
from router.generation.request import GenerationRequest

VOCAB_SIZE = 512
MAX_LEN = 64
EOS = frozenset({2})


def tokens(*ids: int, **sampling: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(ids=ids),
        sampling=inference_pb2.SamplingOptions(**sampling),  # type: ignore[arg-type]
    )


def facts(max_len: int = MAX_LEN, recommended: SamplingOptions = NOTHING_SAID) -> ModelFacts:
    return ModelFacts(VOCAB_SIZE, max_len, EOS, recommended)


def read(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    return public_messages.read_request(message, message.ByteSize())


def chat(*turns: tuple[str, str]) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt())
    for role, content in turns:
        request.chat.messages.add(role=role).content.add(text=content)
    return request


def tools(
    *names: str,
    description: str = "",
    parameters: dict[str, Any] | None = None,
    choice: int = 0,
    required: str = "",
    sampling: dict[str, Any] | None = None,
) -> inference_pb2.GenerateRequest:
    chat = inference_pb2.ChatPrompt(tool_choice=choice, required_tool=required)  # type: ignore[arg-type]
    chat.messages.add(role="user").content.add(text="a")
    for name in names:
        tool = chat.tools.add(name=name, description=description)
        tool.parameters.update(parameters or {})
    options = inference_pb2.SamplingOptions(**sampling or {})
    return inference_pb2.GenerateRequest(chat=chat, sampling=options)


def at(now_unix_s: int) -> inference_pb2.GenerateRequest:
    request = chat(("user", "a"))
    request.chat.now_unix_s = now_unix_s
    return request


def tool_call(name: str, arguments: str) -> inference_pb2.GenerateRequest:
    request = chat(("assistant", ""))
    request.chat.messages[0].tool_calls.add(id="1", name=name, arguments=arguments)
    return request
