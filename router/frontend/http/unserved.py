"""What clients of other servers may say and nothing here serves yet: refused by name. Pure.

A value that changes nothing is no refusal, null least of all. Members that are in no
table are passed over, as everywhere: clients send them for servers that are not this one.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from diptych.errors import InvalidRequestError

Unserved = Mapping[str, tuple[object, ...]]
"""Of each member the values beside null that change nothing."""

_ANY_BODY: Final[Unserved] = {
    "adapter": ("",),
    "constraint": (),
    "allowed_token_ids": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "extra_key": ("", []),
    "kv_transfer_params": (),
    "guided_whitespace_pattern": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": ("",),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_margins": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_params": ({},),
    "skip_special_tokens": (True,),
    "stop_regex": ([], ""),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

OF_PROMPTS: Final[Unserved] = {
    "add_special_tokens": (True,),
    "extra_key": ("", []),
    "truncate_prompt_tokens": (),
    "truncation_size": (),
}
"""Of bodies whose prompts alone are looked at."""

OF_EMBEDDINGS: Final[Unserved] = {
    **OF_PROMPTS,
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
}

OF_RERANK: Final[Unserved] = {
    **OF_PROMPTS,
    "max_tokens_per_doc": (0,),
    "rank_fields": (["text"], []),
    "return_documents": (True,),
}

OF_TOKENS: Final[Unserved] = {"return_token_strs": (False,)}
"""Of bodies to tokenise, beside what is one's own of a completion's or a chat's."""

OF_COMPLETION: Final[Unserved] = {
    **_ANY_BODY,
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}

_ANY_CHAT: Final[Unserved] = {
    **_ANY_BODY,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "input_ids": (),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": (),
    "separate_reasoning": (True,),
    "store": (False,),
    "stream_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

OF_CHAT: Final[Unserved] = {**_ANY_CHAT, "reasoning": ()}

OF_RESPONSE: Final[Unserved] = {
    **_ANY_CHAT,
    "background": (False,),
    "best_of": (1,),
    "context_management": ([],),
    "conversation": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "messages": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "truncation": ("disabled",),
}
"""Nothing is stored, there is one choice, and what a chat says otherwise is not read."""

SAID_IN_RESPONSE: Final[Mapping[str, str]] = {
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""Where a response says what a chat says with these."""

OF_REASONING: Final[Unserved] = {"effort": (), "generate_summary": (), "summary": ()}

OF_TEXT: Final[Unserved] = {"verbosity": ("medium",)}

OF_STRUCTURED_OUTPUTS: Final[Unserved] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}

OF_MESSAGE: Final[Unserved] = {
    "audio": (),
    "function_call": (),
    "prefix": (False,),
    "refusal": ("",),
}


def refuse(
    content: Mapping[str, object],
    unserved: Unserved,
    within: str = "",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise InvalidRequestError for the first member that asks for what is not served.

    ``elsewhere``: the members of this body that say what others of the table say in another.
    """
    for name, value in content.items():
        if value is None or name not in unserved:
            continue
        if not any(_is_same(value, neutral) for neutral in unserved[name]):
            path = f"{within}.{name}" if within else name
            where = elsewhere.get(name)
            reason = f"is said in {where} here" if where else "is not supported yet"
            raise InvalidRequestError(reason, field=path)


def refuse_beside(content: Mapping[str, object], names: Iterable[str], other: str) -> None:
    """Raise InvalidRequestError for the first of ``names`` that is said together with another."""
    for name in names:
        if content.get(name) is not None:
            raise InvalidRequestError(f"goes with no {other}", field=name)


def _is_same(value: object, neutral: object) -> bool:
    """As JSON tells values apart: true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
