"""OpenAI's client: chats, completions, responses, vectors, models, and a refusal.

Run by ``make clients``. Raises AssertionError.
"""

import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

QUESTION = "Say something."
NUM_TOKENS = 12


class Hour(BaseModel):
    """What an answer has to be."""

    hour: Literal["noon", "midnight"]


def main(url: str, model: str) -> None:
    """Ask the server at ``url``, whose path ends with /v1."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == [model]
        said = chat(client, model)
        complete(client, model)
        assert respond(client, model) == said
        vectors = client.embeddings.create(model=model, input=["a", "b"])
        assert len(vectors.data) == 2
        assert len(vectors.data[0].embedding) == len(vectors.data[1].embedding) > 0
        refuse(client, model)


def chat(client: openai.OpenAI, model: str) -> str:
    """What the model says, whole and in pieces; an answer of a given form."""
    message: openai.types.chat.ChatCompletionUserMessageParam
    message = {"role": "user", "content": QUESTION}
    whole = client.chat.completions.create(
        model=model, messages=[message], temperature=0, max_tokens=NUM_TOKENS
    )
    text = whole.choices[0].message.content
    stream = client.chat.completions.create(
        model=model, messages=[message], temperature=0, max_tokens=NUM_TOKENS,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    *pieces, last = stream
    assert text
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    parsed = client.chat.completions.parse(model=model, messages=[message], response_format=Hour)
    assert isinstance(parsed.choices[0].message.parsed, Hour)
    return text


def complete(client: openai.OpenAI, model: str) -> None:
    """How a text goes on, token by token and in pieces."""
    asked: Any = {"prompt": "One, two, three,", "temperature": 0, "max_tokens": NUM_TOKENS}
    (choice,) = client.completions.create(model=model, logprobs=1, **asked).choices
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    stream = client.completions.create(model=model, stream=True, **asked)
    assert "".join(piece.choices[0].text for piece in stream) == choice.text


def respond(client: openai.OpenAI, model: str) -> str:
    """What the model says by the Responses API, whole and in events."""
    whole = client.responses.create(
        model=model, input=QUESTION, temperature=0, max_output_tokens=NUM_TOKENS
    )
    with client.responses.stream(
        model=model, input=QUESTION, temperature=0, max_output_tokens=NUM_TOKENS
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    return whole.output_text


def refuse(client: openai.OpenAI, model: str) -> None:
    """The field that is wrong is named."""
    named = None
    try:
        client.completions.create(model=model, prompt="a", temperature=-5)
    except openai.BadRequestError as error:
        named = error.param
    assert named == "temperature"


if __name__ == "__main__":
    main(*sys.argv[1:])
