"""The lines of a chat that are not for the model: commands, which begin with a slash."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from diptych.cli import saved_chat
from diptych.cli.breakdown import breakdown
from diptych.cli.conversation import Conversation
from diptych.cli.sampling_flags import FLAGS, describe
from diptych.errors import InvalidRequestError
from diptych.sampling_params import OPTIONS

MANY_LINES = '"""'
EXITS = ("/exit", "/bye", "/quit")
_WIDTH = max(map(len, FLAGS))


class Command(NamedTuple):
    """One command: ``do`` gets what stands behind its name and says what to show."""

    usage: str
    summary: str
    do: Callable[[Conversation, str], list[str]]


def obey(conversation: Conversation, line: str) -> list[str]:
    """Do what a line says that begins with a slash; lines to show. Raises InvalidRequestError."""
    name, _, rest = line.partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        raise InvalidRequestError("no such command; /help lists them", field=name)
    return command.do(conversation, rest.strip())


def _set(conversation: Conversation, rest: str) -> list[str]:
    if not rest:
        return [
            f"{name:<{_WIDTH}} {_shown(conversation, name):<8} {describe(OPTIONS[name])}"
            for name in FLAGS
        ]
    try:
        name, *words = shlex.split(rest)
    except ValueError as error:
        raise InvalidRequestError(str(error), field="/set") from None
    name = name.replace("-", "_")
    conversation.set_option(name, words)
    return [f"{name} is {_shown(conversation, name)}"]


def _shown(conversation: Conversation, name: str) -> str:
    """The value of an option."""
    value = getattr(conversation.options, name)
    return "unset" if value is None or value in ((), {}) else str(value)


def _system(conversation: Conversation, rest: str) -> list[str]:
    conversation.system = rest
    return ["the system message is set" if rest else "there is no system message"]


def _clear(conversation: Conversation, rest: str) -> list[str]:
    conversation.clear()
    return ["everything that was said is forgotten"]


def _save(conversation: Conversation, rest: str) -> list[str]:
    turns = conversation.turns
    saved_chat.save(_path(rest, "/save"), turns)
    return [f"{len(turns)} messages are in {rest}"]


def _load(conversation: Conversation, rest: str) -> list[str]:
    turns = saved_chat.load(_path(rest, "/load"))
    conversation.restore(turns)
    return [f"the chat goes on behind {len(turns)} messages"]


def _path(rest: str, command: str) -> Path:
    if not rest:
        raise InvalidRequestError("a file has to be named", field=command)
    try:
        return Path(rest).expanduser()
    except RuntimeError as error:
        raise InvalidRequestError(str(error), field=command) from None


def _stats(conversation: Conversation, rest: str) -> list[str]:
    last = conversation.last
    if last is None or last.usage is None or last.timing is None:
        return ["there is no answer, or it did not come to its end"]
    return breakdown(last.usage, last.timing)


def _help(conversation: Conversation, rest: str) -> list[str]:
    lines = [f"{command.usage:<20}{command.summary}" for command in _COMMANDS.values()]
    return [
        *lines,
        f"{EXITS[0]:<20}End, as /bye, /quit and Ctrl-D do. Ctrl-C ends an answer only.",
        f"{'//TEXT':<20}Say what begins with a slash.",
        f"{MANY_LINES:<20}Begin a text of several lines, which ends as it begins.",
    ]


_COMMANDS = {
    "/set": Command(
        "/set NAME VALUE", "Set a sampling option; no VALUE: unset it; no NAME: list all.", _set
    ),
    "/system": Command("/system TEXT", "Set the system message; no TEXT: have none.", _system),
    "/save": Command("/save FILE", "Write what was said to a file, as JSON.", _save),
    "/load": Command("/load FILE", "Go on with a chat that was saved; this one is gone.", _load),
    "/clear": Command("/clear", "Forget what was said. Settings stay.", _clear),
    "/stats": Command("/stats", "Show where the last answer's time and its KV went.", _stats),
    "/help": Command("/help", "Show this.", _help),
}
