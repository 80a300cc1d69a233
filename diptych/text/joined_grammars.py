"""Grammars that refer to others, in llguidance's form. Pure."""

import json

GAP = r"/[ \n]{1,8}/"
"""Between marks and what is behind them; models write line breaks there."""


def with_answer(lark: str, answer: str, name: str) -> str:
    """A grammar that refers to an ``answer``, another one of llguidance's, by its ``name``."""
    first, others = {"lark_grammar": answer}, []
    if answer.startswith("{"):
        first, *others = json.loads(answer)["grammars"]
    joined = {"grammars": [{"lark_grammar": lark}, {**first, "name": name}, *others]}
    return json.dumps(joined, ensure_ascii=False)  # else some characters have twelve bytes
