"""Calls as Llama 4 writes them, ``[f(a=1), g()]``: read as Python's syntax, never run. Pure."""

import ast
from typing import Final

_MOST_CHARACTERS: Final = 65_536  # the compiler's time and stack grow with it


def read_calls(text: str) -> list[dict[str, object]]:
    """Name and arguments of each call. Raises ValueError: it is something else."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError("too long")
    try:
        written = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(written, ast.List) or not written.elts:
        raise ValueError("not a list of calls")
    return [_read_call(each) for each in written.elts]


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
