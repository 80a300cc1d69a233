"""The standard streams of a command: what they can show, and how they end."""

import codecs
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from diptych.errors import ConfigurationError

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_what_was_closed() -> None:
    """A standard stream that whoever started us closed (``>&-``) is an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - for as long as we run


def show_what_can_be_shown() -> None:
    """Standard output shows a mark for each character that its encoding has not.

    A model says what it likes, in a terminal of any locale. A path of bytes that are no text is
    written as it is.
    """
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        has_all = codecs.lookup(stream.encoding).name == "utf-8"
        stream.reconfigure(errors="surrogateescape" if has_all else "replace")


@contextmanager
def writing() -> Iterator[None]:
    """All that is written within is out in the end: else the interpreter would complain later.

    Raises BrokenPipeError: nobody reads it; ConfigurationError: there is no room for it.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        drop_output()
        raise ConfigurationError(f"no room for what is written: {error.strerror}") from None


def drop_output() -> None:
    """What is left goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_input() -> str:
    """All of standard input. Raises ConfigurationError: it is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"standard input: not {error.encoding} from byte {error.start} on"
        ) from None
