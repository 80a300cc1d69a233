"""How families of models say what they think and call, where their checkpoints do not declare it.

Each is known by what stands in its chat template. Written as the marks are in the models'
own templates and model cards.
"""

import enum
from collections.abc import Mapping
from functools import cache
from typing import Final

from diptych.text.response.template import CallIdForm, ResponseTemplate


class AnswerForm(enum.StrEnum):
    """How a model's answers are read: one of the families, or as follows."""

    AUTO = "auto"  # as the checkpoint says, or as its chat template looks like
    NONE = "none"  # all of it is content
    DEEPSEEK = "deepseek"
    GEMMA4 = "gemma4"
    GLM = "glm"
    GPT_OSS = "gpt-oss"
    HERMES = "hermes"
    KIMI_K2 = "kimi-k2"
    KIMI_K3 = "kimi-k3"
    LLAMA_JSON = "llama-json"
    LLAMA_PYTHONIC = "llama-pythonic"
    MISTRAL = "mistral"
    QWEN_XML = "qwen-xml"
    THINK = "think"


def _begun(mark: str) -> str:
    """A pattern of what may become ``mark``, from nothing on."""
    pattern = ""
    for character in reversed(mark[:-1]):
        pattern = f"(?:{character}{pattern})?"
    return pattern


_CALL: Final = {"function": {"name": "{name}", "arguments": "{content}"}}
_CALL_OF_NOTHING: Final = {"function": {"name": "{name}", "arguments": {}}}
_BARE_CALL: Final = {"function": "{content}"}
# Behind the last of these a prompt is the answer's begin. Those of other families are what a
# user may have written.
_STARTS: Final = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<|assistant|>",
)
_OWN_STARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "deepseek": ("<｜Assistant｜>",),
    "gemma4": ("<|turn>model\n", "<tool_response|>"),
    "glm": ("<|assistant|>",),
    "gpt-oss": ("<|start|>assistant",),
    "kimi-k2": ("<|im_assistant|>assistant<|im_middle|>",),
    "kimi-k3": ('<|open|>message role="assistant"<|sep|>',),
    "llama-json": ("<|start_header_id|>assistant<|end_header_id|>\n\n",),
    "llama-pythonic": ("<|header_start|>assistant<|header_end|>\n\n",),
    "mistral": ("[/INST]", "[/TOOL_RESULTS]"),
}
_CALL_IDS: Final = {"kimi-k2": CallIdForm.NUMBERED, "mistral": CallIdForm.SHORT}
# Where a model's calls have no mark of their own, or where its answers have one, nothing is said.
_CALLS_BEGIN: Final[Mapping[str, list[str]]] = {
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        "<｜DSML｜calls>",
    ],
    "gemma4": ["<|tool_call>call:"],
    "glm": ["<tool_call>"],
    "kimi-k2": ["<|tool_calls_section_begin|>"],
    "mistral": ["[TOOL_CALLS]"],
    "qwen-xml": ["<tool_call>"],
}
_BETWEEN: Final = {"gpt-oss": "<|start|>assistant"}
# What an answer only mentions later on is no thought: it begins with its thoughts.
_THINK: Final = {"open": "<think>", "open_pattern": r"\A\s{0,8}<think>", "close": "</think>"}
_CONTENT: Final = {"content": "text"}

_HERMES: Final = {
    "reasoning_content": _THINK,
    "tool_calls": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "transform": _BARE_CALL,
    },
}
# A value's end counts where another value or the end of all follows; so one may speak of ends,
# and of all but another value. Some leave it out: nothing within such a one may look like an end.
_QWEN_NEXT: Final = r"\n<parameter=[^>\n]{1,128}>\n"
_QWEN_ARGUMENT: Final = (
    r"\G\s*+<parameter=(?P<key>[^>\n]{1,128})>\n?"
    r"(?:(?P<value>(?:[^<\n]++|(?!</parameter>|</?function[=>])[<\n])*?)"
    rf"\n?(?:</parameter>\s*+(?=<parameter=|\Z)|(?={_QWEN_NEXT})|(?:</function>)?\Z)"
    rf"|(?P<value>(?:[^<\n]++|(?!{_QWEN_NEXT})[<\n])*?)"
    r"\n?</parameter>\s*+(?=<parameter=|\Z))"
)
_QWEN_HEAD: Final = r"(?:<tool_call>\s{0,64})?<function=(?P<name>[^>\n]{1,128})>"
# What may become the wrapper's end is waited for.
_QWEN_WRAPPED: Final = rf"(?:\s{{0,64}}</tool_call>|\s{{0,64}}{_begun('</tool_call>')}\Z)?"
# Behind a value's end there is none. Where it looks behind for what may be less, ``regex`` takes a
# mark that did not match for one that is begun: hence ``+``.
_QWEN_END: Final = (
    r"</function>(?:\s{0,64}</tool_call>|(?=\s{0,64}(?:<tool_call>|<function=))"
    rf"|(?<=</parameter>\s{{0,64}}+</function>){_QWEN_WRAPPED})"
    r"|</tool_call>(?<=</parameter>\s{0,64}+</tool_call>)"
    r"|(?=(?:<tool_call>\s{0,64})?<function=)(?<=</parameter>\s{0,64}+)"
)
_QWEN_XML: Final = {
    # Some begin to call without having ended their thoughts.
    "reasoning_content": {
        **_THINK,
        "close_pattern": r"</think>|(?=<tool_call>\s{0,64}<function=)",
    },
    "tool_calls": [
        {
            "open_pattern": rf"{_QWEN_HEAD}\s{{0,64}}(?=</function>)",
            "close_pattern": rf"</function>{_QWEN_WRAPPED}",
            "transform": _CALL_OF_NOTHING,
        },
        {
            "open_pattern": _QWEN_HEAD,
            "close_pattern": _QWEN_END,
            "content": "xml-inline",
            "content_args": {"tag_pattern": _QWEN_ARGUMENT},
            "transform": _CALL,
        },
        {
            "open_pattern": r"<tool_call>\s{0,64}(?=\{)",
            "close": "</tool_call>",
            "content": "json",
        },
    ],
    "call_marks": {"open": ["<tool_call>", "</tool_call>"]},
}
_GLM_NAME: Final = r"<tool_call>\s{0,64}(?P<name>[^\s<>{}]{1,128})\s{0,64}"
_GLM_NEXT: Final = r"<arg_key>[^<\n]{1,256}</arg_key>\s{0,64}<arg_value>"
_GLM_ARGUMENT: Final = (  # as Qwen's, but whole values may stand within one
    r"\G\s*+<arg_key>(?P<key>[^<\n]{1,256})</arg_key>\s*+<arg_value>"
    rf"(?:(?P<value>(?:[^<]++|(?!</arg_value>|</tool_call>|{_GLM_NEXT})<)*?)"
    r"(?:</arg_value>\s*+(?=<arg_key>|\Z)|(?:</tool_call>)?\Z)"
    rf"|(?P<value>(?:[^<]++|(?!{_GLM_NEXT})<"
    rf"|{_GLM_NEXT}(?:[^<]++|(?!</?arg_value>)<)*+</arg_value>)*?)"
    r"</arg_value>\s*+(?=<arg_key>|\Z))"
)
_GLM: Final = {
    "reasoning_content": _THINK,
    "tool_calls": [
        {
            "open_pattern": rf"{_GLM_NAME}(?=<arg_key>)",
            # Some leave out the last value's end, or the call's; a value may speak of a call's.
            "close_pattern": r"(?<=</arg_value>)\s{0,64}</tool_call>"
            r"|</tool_call>\s{0,64}(?=<tool_call>)"
            r"|(?=<tool_call>\s{0,64}[^\s<>{}]{1,128}\s{0,64}(?:<arg_key>|</tool_call>))"
            r"(?<=</arg_value>\s{0,64}+)",
            "content": "xml-inline",
            "content_args": {"tag_pattern": _GLM_ARGUMENT},
            "transform": _CALL,
        },
        {
            "open_pattern": rf"{_GLM_NAME}(?=</tool_call>)",
            "close": "</tool_call>",
            "transform": _CALL_OF_NOTHING,
        },
        {"open_pattern": rf"{_GLM_NAME}\Z", "content": "json"},  # cut off
    ],
}
_KIMI_K2: Final = {
    "reasoning_content": _THINK,
    "tool_calls": {
        "open_pattern": r"<\|tool_call_begin\|>\s{0,64}(?P<id>(?:functions\.)?"
        r"(?P<name>[^\s<>:{}]{1,128})(?::\d{1,9})?)\s{0,64}<\|tool_call_argument_begin\|>",
        "close": "<|tool_call_end|>",
        "content": "json",
        "transform": _CALL,
    },
    "call_marks": [
        # What is said before the first call is for nobody.
        {"open_pattern": r"<\|tool_calls_section_begin\|>[^<]{0,256}+"},
        {"open": "<|tool_calls_section_end|>"},
        {"open_pattern": r"<\|tool_call_begin\|>[^<]{0,192}(?:<\|tool_call_arg[^<>]{0,16})?\Z"},
    ],
}
_KIMI_K3: Final = {
    # Some begin to answer though the prompt has begun their thoughts.
    "reasoning_content": {
        "open": "<|open|>think<|sep|>",
        "close": "<|close|>think<|sep|>",
        "close_pattern": r"<\|close\|>think<\|sep\|>|(?=<\|open\|>response<\|sep\|>)",
    },
    "content": [
        {"content": "text"},
        {"open": "<|open|>response<|sep|>", "close": "<|close|>response<|sep|>"},
    ],
    "tool_calls": {
        "open_pattern": r"<\|open\|>call tool=\"(?P<name>[^\"<]{1,192})\"[^<]{0,64}<\|sep\|>",
        "close": "<|close|>call<|sep|>",
        "content": "xml-inline",
        # An end of a value counts where another value or the end of all follows.
        "content_args": {
            "tag_pattern": r"<\|open\|>argument key=\"(?P<key>[^\"<]{1,256})\" "
            r"type=\"(?:(?P<string>string)|\w{1,32})\"<\|sep\|>(?P<value>.*?)"
            r"<\|close\|>argument<\|sep\|>\s*+(?=<\|open\|>argument |\Z)",
            "escaped_keys": True,
        },
        "transform": _CALL,
    },
    "call_marks": {"open": ["<|open|>tools<|sep|>", "<|close|>tools<|sep|>"]},
    "ignored": [
        {"open": "<|close|>message<|sep|>"},
        {"open_pattern": r"<\|(?:open|close)\|>[^<]{0,256}(?:<\|sep[^<>]{0,2})?\Z"},  # cut off
    ],
}
_LLAMA_JSON: Final = {
    "tool_calls": [
        {
            # Some write calls as lines, or as a list.
            "open_pattern": r"\A\s{0,64}(?=\{|\[\s{0,64}\{)"
            r"|(?:[;,]|(?<=\}))\s{0,64}(?=\{\s{0,64}\"(?:name|type|function)\")",
            "close_value": True,
            "known_names": True,
            "content": "json",
        },
        {
            "open_pattern": r"<\|python_tag\|>\s{0,64}(?=\{|\[\s{0,64}\{)",
            "close_value": True,
            "content": "json",
        },
    ],
    "call_marks": {"open": "<|python_tag|>"},
    "ignored": {"open": "<|eom_id|>"},
}
_LLAMA_PYTHONIC: Final = {
    "tool_calls": {
        "open_pattern": r"(?:\A|<\|python_start\|>)\s{0,64}(?=\[\s{0,64}[A-Za-z_][\w.]{0,127}\()",
        "close_value": True,
        "content": "pythonic",
    },
    "call_marks": {"open": ["<|python_start|>", "<|python_end|>"]},
}
_MISTRAL: Final = {
    "reasoning_content": [{"open": "[THINK]", "close": "[/THINK]"}, _THINK],
    "tool_calls": [
        {
            "open_pattern": r"\[TOOL_CALLS\]\s{0,64}(?=\[\s{0,64}\{)",
            "close_value": True,
            "content": "json",
        },
        {
            "open_pattern": r"\[TOOL_CALLS\]\s{0,64}(?P<name>[^\s\[\]{}]{1,128})"
            r"(?:\[CALL_ID\][^\s\[\]{}]{0,64})?(?:\[ARGS\])?\s{0,64}(?=\{)",
            "close_value": True,
            "content": "json",
            "transform": _CALL,
        },
    ],
    "call_marks": {"open": "[TOOL_CALLS]"},
}
_GEMMA4: Final = {
    "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
    "tool_calls": {
        "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{]{1,128})\s{0,64}(?=\{)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": _CALL,
    },
    "ignored": {"open": ["<|tool_response>", "<turn|>"]},
}
# A header says who speaks, to whom, on which channel and as which type; whom, on either side of
# the channel.
_ASIDE: Final = r"<\|channel\|>(?:commentary|analysis)"
_NAME: Final = r"(?P<name>[\w.:-]{1,128})"
_KIND: Final = (
    r"(?:\s{0,64}<\|constrain\|>\s{0,8}[\w./+-]{1,64}|\s{1,64}[\w./+-]{1,64}|json)?"
    r"\s{0,64}<\|message\|>"
)
_TO_NONE: Final = rf"(?:(?:{_ASIDE}\s{{0,64}})?to=(?:assistant|user)\s{{0,64}})?"
_TO_ANY: Final = rf"(?:(?:{_ASIDE}\s{{0,64}})?to=[^\s<]{{1,128}}+\s{{0,64}})?"
_ENDS: Final = ["<|end|>", "<|call|>", "<|return|>"]
_GPT_OSS: Final = {
    "reasoning_content": {
        "open": "<|channel|>analysis<|message|>",
        "open_pattern": rf"{_TO_NONE}<\|channel\|>analysis{_KIND}",
        "close": _ENDS,
    },
    "tool_calls": [
        {
            "open_pattern": rf"(?:{_ASIDE}\s{{0,64}})?to=functions\.{_NAME}"
            rf"(?:\s{{0,64}}{_ASIDE})?{_KIND}",
            "close": _ENDS,
            "content": "json",
            "transform": _CALL,
        },
        {  # some leave out where functions are
            "open_pattern": rf"(?:{_ASIDE}\s{{0,64}}to={_NAME}(?:\s{{0,64}}{_ASIDE})?"
            rf"|to={_NAME}\s{{0,64}}{_ASIDE}){_KIND}",
            "close": _ENDS,
            "known_names": True,
            "content": "json",
            "transform": _CALL,
        },
        {  # cut off
            "open_pattern": rf"(?:{_ASIDE}\s{{0,64}})?to=functions\.[\w.:-]{{0,128}}\s{{0,64}}"
            r"(?:<\|channel\|>\w{0,16}\s{0,64})?(?:<\|constrain\|>)?\w{0,64}\Z",
            "content": "json",
        },
    ],
    "content": [
        {"content": "text"},
        {
            "open": ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
            "open_pattern": rf"(?:{_TO_ANY}<\|channel\|>final"
            rf"|{_TO_NONE}<\|channel\|>commentary){_KIND}",
            "close": _ENDS,
        },
    ],
    "ignored": [
        {"open": ["<|start|>assistant", *_ENDS]},
        # What is for a tool of the model's makers is for nobody here.
        {
            "open_pattern": rf"(?:{_ASIDE}\s{{0,64}}to=(?!functions\.)[^<]{{1,192}}+"
            r"|to=(?!functions\.)[^\s<]{1,128}+\s{0,64}(?=<\|channel\|>))"
            rf"(?:{_ASIDE}[^<]{{0,128}}+)?(?:<\|constrain\|>\w{{1,64}}\s{{0,64}})?<\|message\|>",
            "close": _ENDS,
        },
        {  # cut off
            "open_pattern": r"(?:<\|start\|>\w{0,16}|<\|channel\|>\w{0,16}\s{0,64}"
            r"(?:<\|constrain\|>\w{0,64}\s{0,64})?)\Z"
        },
    ],
}
_DEEPSEEK: Final = {
    "reasoning_content": _THINK,
    "tool_calls": [
        {
            "open_pattern": r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]{1,128})\n"
            r"```json\n",
            "close_pattern": r"\n?```\s{0,64}<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _CALL,
        },
        {
            "open_pattern": r"<｜tool▁call▁begin｜>(?P<name>[^\n<]{1,128})<｜tool▁sep｜>"
            r"\s{0,64}(?=\{)",
            "close": "<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _CALL,
        },
        {
            "open_pattern": r"<｜DSML｜\s?invoke name=\"(?P<name>[^\"\n]{1,128})\">",
            "close_pattern": r"</｜DSML｜\s?invoke>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<｜DSML｜\s?parameter name=\"(?P<key>[^\"\n]{1,128})\" "
                r"string=\"(?P<string>true|false)\">(?P<value>.*?)</｜DSML｜\s?parameter>"
            },
            "transform": _CALL,
        },
        {
            "open_pattern": r"<｜DSML｜\s?invoke name=\"(?P<name>[^\"\n]{1,128})\"\s{0,64}(?=/>)",
            "close": "/>",
            "transform": _CALL_OF_NOTHING,
        },
    ],
    "call_marks": [
        {"open": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]},
        {"open_pattern": r"</?｜DSML｜\s?(?:function_calls|tool_calls|calls)>"},
    ],
}

_FAMILIES: Final[Mapping[str, Mapping[str, object]]] = {
    "deepseek": _DEEPSEEK,
    "gemma4": _GEMMA4,
    "glm": _GLM,
    "gpt-oss": _GPT_OSS,
    "hermes": _HERMES,
    "kimi-k2": _KIMI_K2,
    "kimi-k3": _KIMI_K3,
    "llama-json": _LLAMA_JSON,
    "llama-pythonic": _LLAMA_PYTHONIC,
    "mistral": _MISTRAL,
    "qwen-xml": _QWEN_XML,
    "think": {"reasoning_content": _THINK},
}

# What a chat template has to have; the first family that fits counts.
_SIGNS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen-xml", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("kimi-k2", ("<|tool_calls_section_begin|>",)),
    ("kimi-k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("deepseek", ("｜tool▁call",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama-pythonic", ("<|header_start|>", "<|python_start|>")),
    ("llama-json", ("<|start_header_id|>", "tools")),
    ("deepseek", ("｜DSML｜",)),
    ("think", ("<think>",)),
)


@cache
def family(name: str) -> ResponseTemplate:
    """The template of one of the families."""
    fields = {"content": _CONTENT, **_FAMILIES[name]}
    starts = list(_OWN_STARTS.get(name, _STARTS))
    return ResponseTemplate.read(
        {
            "fields": fields,
            "start_anchor": starts,
            "call_ids": _CALL_IDS.get(name, CallIdForm.ANY),
            "between": _BETWEEN.get(name, ""),
            "calls_begin": _CALLS_BEGIN.get(name),
        },
        f"family {name}",
    )


def family_of(chat_template: str) -> ResponseTemplate | None:
    """That of a model, by its chat template; None: it does as nobody does that is known."""
    for name, texts in _SIGNS:
        if all(text in chat_template for text in texts):
            return family(name)
    return None
