"""What clients of other servers may say and nothing here serves yet: refused by name. Pure.

A value that changes nothing is no refusal, null least of all. Members that are in no
table are passed over, as everywhere: clients send them for servers that are not this one.
"""

from collections.abc import Mapping
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
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": ("",),
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
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

OF_COMPLETION: Final[Unserved] = {
    **_ANY_BODY,
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}

OF_CHAT: Final[Unserved] = {
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
    "reasoning": (),
    "reasoning_effort": (),
    "separate_reasoning": (True,),
    "store": (False,),
    "stream_reasoning": (True,),
    "verbosity": (),
    "web_search_options": (),
}

OF_RESPONSE: Final[Unserved] = {
    **_ANY_BODY,
    "background": (False,),
    "best_of": (1,),
    "chat_template": (),
    "context_management": ([],),
    "conversation": (),
    "echo": (False,),
    "moderation": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "store": (False,),
    "truncation": ("disabled",),
}
"""Nothing is stored, and there is one choice."""

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


def refuse(content: Mapping[str, object], unserved: Unserved, within: str = "") -> None:
    """Raise InvalidRequestError for the first member that asks for what is not served."""
    for name, value in content.items():
        if value is None or name not in unserved:
            continue
        if not any(_is_same(value, neutral) for neutral in unserved[name]):
            path = f"{within}.{name}" if within else name
            raise InvalidRequestError("is not supported yet", field=path)


def _is_same(value: object, neutral: object) -> bool:
    """As JSON tells values apart: true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
