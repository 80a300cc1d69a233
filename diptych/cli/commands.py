"""Picks the subcommand. The roles are run as the modules they are (``python -m router``)."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from diptych import __version__
from diptych.child_process import module_command
from diptych.cli.streams import (
    drop_output,
    open_what_was_closed,
    show_what_can_be_shown,
    writing,
)
from diptych.errors import ConfigurationError
from diptych.loading import raise_at_interrupt
from diptych.process import EXIT_CONFIGURATION, complain

_EXIT_BROKEN_PIPE = 141  # as a shell has it of one that the signal ended


class Command(NamedTuple):
    """One subcommand: ``target`` is a module of this package, or a role's module."""

    name: str
    summary: str
    target: str
    is_role: bool = False


COMMANDS = (
    Command("up", "start a local cluster: a router and its workers as child processes", "up"),
    Command("generate", "stream one answer from a router", "generate"),
    Command("chat", "talk with a model, line by line", "chat"),
    Command("top", "watch the pools in the terminal", "top"),
    Command("batch", "have a file of requests answered by a batch server", "batch"),
    Command("admin", "change what a running worker does", "admin"),
    Command("health", "ask a router or a worker for its health", "health"),
    Command("key", "make a client's key", "key"),
    Command("trace", "list, convert and draw recorded traces", "trace"),
    Command("simulate", "say what so many workers would give, on a trace", "simulate"),
    Command("model", "fetch a model, or import a GGUF file, ahead of time", "model"),
    Command("router", "run a router", "router", is_role=True),
    Command("worker", "run a worker of either role, or of both", "soft_worker", is_role=True),
    Command("prefill", "run a prefill worker", "prefill_worker", is_role=True),
    Command("decode", "run a decode worker", "decode_worker", is_role=True),
    Command("batch-server", "run a batch server", "batch_server", is_role=True),
)


def usage() -> str:
    """What ``diptych --help`` prints."""
    commands = "\n".join(f"  {command.name:<14}{command.summary}" for command in COMMANDS)
    return f"""usage: diptych COMMAND [--help] [SETTINGS]

Disaggregated prefill/decode serving for large language models.

commands:
{commands}

Each command takes its settings from flags, from the environment
(DIPTYCH_<COMMAND>_<SETTING>) and from a YAML file (--config), in this order.
`diptych COMMAND --help` lists them. `diptych --version` prints the version."""


def run(args: Sequence[str] | None = None) -> int:
    """Run ``diptych`` with ``args`` (``sys.argv[1:]``); the exit code."""
    open_what_was_closed()
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())  # noqa: T201
        return 0 if args else EXIT_CONFIGURATION
    if args[0] == "--version":
        print(__version__)  # noqa: T201
        return 0
    command = next((c for c in COMMANDS if c.name == args[0]), None)
    if command is None:
        names = ", ".join(c.name for c in COMMANDS)
        print(f"diptych: no command {args[0]!r}; there are {names}", file=sys.stderr)  # noqa: T201
        return EXIT_CONFIGURATION
    if command.is_role:
        os.execv(sys.executable, [*module_command(command.target), *args[1:]])
    show_what_can_be_shown()
    try:
        module = importlib.import_module(f"diptych.cli.{command.target}")
        target: Callable[[list[str]], int] = module.run
        raise_at_interrupt()
        with writing():
            return target(args[1:])
    except ConfigurationError as error:
        return complain(command.name, error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads what is written has enough
        drop_output()
        return _EXIT_BROKEN_PIPE
