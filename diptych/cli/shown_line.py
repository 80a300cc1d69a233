"""One line for a person, whoever wrote what is in it: a model, its template, a file. Pure."""

import re


def shown(text: str) -> str:
    """In one line, without what a terminal would obey."""
    line = re.sub(r"[ \t\r\n]+", lambda found: _space(found[0]), text)
    return "".join(each if each.isprintable() else _escaped(each) for each in line)


def _space(found: str) -> str:
    return " " if found.strip(" ") else found


def _escaped(character: str) -> str:
    """As JSON has it, which is two of them beyond the 16 bits of one."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
