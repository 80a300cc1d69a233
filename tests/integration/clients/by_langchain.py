"""A chat by langchain-openai: whole, streamed, with an output of a schema, and vectors.

Runs in an environment of its own (``make clients``). Raises AssertionError.
"""

import sys

from langchain_openai import ChatOpenAI, OpenAIEmbeddings

SCHEMA = {
    "title": "answer",
    "description": "What was asked for.",
    "type": "object",
    "properties": {"utc": {"type": "boolean"}},
    "required": ["utc"],
    "additionalProperties": False,
}


def main(url: str, model: str) -> None:
    """Ask the server at ``url``, whose path ends with /v1."""
    chat = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=40)
    whole = chat.invoke("Say something.")
    pieces = [piece.content for piece in chat.stream("Say something.")]
    assert "".join(pieces) == whole.content, (pieces, whole.content)
    assert whole.usage_metadata["output_tokens"] <= 40
    made = chat.with_structured_output(SCHEMA, method="json_schema").invoke("Is it noon?")
    assert set(made) == {"utc"}, made
    vectors = OpenAIEmbeddings(
        model=model, base_url=url, api_key="none", check_embedding_ctx_length=False
    )
    assert len(vectors.embed_documents(["a", "b"])) == 2


if __name__ == "__main__":
    main(*sys.argv[1:])
