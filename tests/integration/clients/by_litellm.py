"""A chat by litellm: whole and streamed, vectors, and a refusal.

Runs in an environment of its own (``make clients``). Raises AssertionError.
"""

import sys
from typing import Any

import litellm


def main(url: str, model: str) -> None:
    """Ask the server at ``url``, whose path ends with /v1."""
    common: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": "none",
        "messages": [{"role": "user", "content": "Say something."}],
        "temperature": 0,
        "max_tokens": 12,
    }
    whole = litellm.completion(**common)
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 12
    pieces = [
        piece.choices[0].delta.content or "" for piece in litellm.completion(**common, stream=True)
    ]
    assert "".join(pieces) == text, (pieces, text)
    made = litellm.embedding(
        model=f"openai/{model}",
        api_base=url,
        api_key="none",
        input=["a", "b"],
        encoding_format="float",
    )
    assert len(made.data) == 2
    refusal = ""
    try:
        litellm.completion(**{**common, "temperature": -5})
    except litellm.BadRequestError as error:
        refusal = str(error)
    assert "temperature" in refusal


if __name__ == "__main__":
    main(*sys.argv[1:])
