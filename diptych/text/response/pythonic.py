"""Calls as Llama 4 writes them, ``[f(a=1), g()]``: read as Python's syntax, never run. Pure."""

import ast
from typing import Final

import regex

# The compiler's time and stack grow with it; texts are read one by one and cost their length.
_MOST_CHARACTERS: Final = 65_536  # without those of texts
_TEXT: Final = regex.compile(
    r"(?<!\w)[rRuU]?(?:"
    r"'''(?:[^'\\]|\\.|'(?!''))*+'''|\"\"\"(?:[^\"\\]|\\.|\"(?!\"\"))*+\"\"\""
    r"|'(?!'')(?:[^'\\\r\n]|\\.)*+'|\"(?!\"\")(?:[^\"\\\r\n]|\\.)*+\")",
    regex.DOTALL,
)


def read_calls(text: str) -> list[dict[str, object]]:
    """Name and arguments of each call. Raises ValueError: it is something else."""
    texts: dict[str, str] = {}

    def place(found: "regex.Match[str]") -> str:
        texts[index := str(len(texts))] = found[0]
        return f"'{index};'"

    bare = _TEXT.sub(place, text).strip()
    if len(bare) > _MOST_CHARACTERS:
        raise ValueError("too long")
    written = _parsed(bare)
    if not isinstance(written, ast.List) or not written.elts:
        raise ValueError("not a list of calls")
    for node in ast.walk(written):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = _joined(node.value, texts)
    return [_read_call(each) for each in written.elts]


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _joined(places: str, texts: dict[str, str]) -> str:
    """What stands at one place or several. Each once: what is no text may look like a place."""
    try:
        return "".join(_said(texts.pop(index)) for index in places.split(";")[:-1])
    except KeyError:
        raise ValueError("no text of an argument") from None


def _said(written: str) -> str:
    """What a text in quotes says."""
    if "\\" not in written and written[:1] == written[-1:] and written[:3] not in ("'''", '"""'):
        return written[1:-1]
    node = _parsed(written)
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, str)
    return node.value


def _read_call(node: ast.expr) -> dict[str, object]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    try:
        arguments = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
    except TypeError as error:  # a key that Python's dictionaries do not take
        raise ValueError(str(error)) from None
    if None in arguments or len(arguments) < len(node.keywords):
        raise ValueError("an argument without a name, or one twice")
    return {"name": ast.unparse(node.func), "arguments": arguments}
