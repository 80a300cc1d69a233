"""Bodies for the HTTP API: a chat, and what is wrong, with the member that its error names."""

from typing import Any

from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "What is the capital of France?"},
    {"role": "user", "content": [{"type": "text", "text": "The quiet garden opens "}]},
    {"role": "assistant", "content": "another number."},
    {"role": "user", "content": "In 1900 the engine was bright."},
]

ERRORS = {
    "no JSON": (b"{", 400, "body"),
    "no object": (b"[1]", 400, "body"),
    "empty": (b"", 400, "body"),
    "not UTF-8": (b'{"model": "\xff"}', 400, "body"),
    "half of a character": (b'{"model": "\\ud800"}', 400, "body"),
    "deep": (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "body"),
    "a member twice": (b'{"model": "m", "model": "m"}', 400, "body"),
    "NaN": (b'{"model": "MODEL", "prompt": "a", "temperature": NaN}', 400, "body"),
    "no model": (b'{"prompt": "a"}', 400, "model"),
    "another model": (b'{"model": "none", "prompt": "a"}', 404, "model"),
    "no prompt": (b'{"model": "MODEL"}', 400, "prompt"),
    "empty prompt": (b'{"model": "MODEL", "prompt": ""}', 400, "prompt"),
    "empty tokens": (b'{"model": "MODEL", "prompt": []}', 400, "prompt"),
    "a token too large": (b'{"model": "MODEL", "prompt": [5, 100000]}', 400, "prompt[1]"),
    "a token below 0": (b'{"model": "MODEL", "prompt": [5, -1]}', 400, "prompt[1]"),
    "too many prompts": (
        b'{"model": "MODEL", "prompt": [' + b'"a", ' * 128 + b'"a"]}',
        400,
        "prompt",
    ),
    "too many choices": (
        b'{"model": "MODEL", "prompt": [' + b'"a", ' * 8 + b'"a"], "n": 16}',
        400,
        "prompt",
    ),
    "a number of prompts": (b'{"model": "MODEL", "prompt": ["a", 5]}', 400, "prompt[1]"),
    "one of two prompts": (b'{"model": "MODEL", "prompt": ["a", ""]}', 400, "prompt[1]"),
    "one prompt of two": (b'{"model": "MODEL", "prompt": ["a", [5, -1]]}', 400, "prompt[1][1]"),
    "timing of two": (
        b'{"model": "MODEL", "prompt": ["a", "b"], "return_timing": true}',
        400,
        "return_timing",
    ),
    "too long": (b'{"model": "MODEL", "prompt": "' + b"bright " * 5000 + b'"}', 400, "prompt"),
    "infinite": (b'{"model": "MODEL", "prompt": "a", "top_p": 1e999}', 400, "top_p"),
    "range": (b'{"model": "MODEL", "prompt": "a", "temperature": -1}', 400, "temperature"),
    "type": (b'{"model": "MODEL", "prompt": "a", "max_tokens": "5"}', 400, "max_tokens"),
    "bool": (b'{"model": "MODEL", "prompt": "a", "seed": true}', 400, "seed"),
    "stop": (b'{"model": "MODEL", "prompt": "a", "stop": ["a", ""]}', 400, "stop[1]"),
    "unserved": (b'{"model": "MODEL", "prompt": "a", "suffix": "b"}', 400, "suffix"),
    "fewer": (b'{"model": "MODEL", "prompt": "a", "n": 3, "best_of": 2}', 400, "best_of"),
    "too large": (b'{"model": "' + b"m" * 70_000 + b'"}', 413, None),
}

CHAT_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "long arguments": (
        {"messages": MESSAGES, "chat_template_kwargs": {"a": "x" * 20_000}},
        "chat_template_kwargs",
    ),
    "no messages": ({"messages": []}, "messages"),
    "no list": ({"messages": "hello"}, "messages"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0].role"),
    "unknown role": ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    "tools": ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
    "template": (
        {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}},
        "chat_template_kwargs.tools",
    ),
    "usage without stream": (
        {"messages": MESSAGES, "stream_options": {"include_usage": True}},
        "stream_options",
    ),
}
