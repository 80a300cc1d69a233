"""How a process of ours begins: before anything that takes long to import.

All else that a role needs is imported within ``loading``.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def open_standard_files() -> None:
    """Give the process standard input, output and error, empty ones, if it was started without.

    Else the first files that it opens take their numbers: the log would go into a socket, and
    libuv, which closes no file of such a number, aborts the process.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest that is free
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, closefd=False))


def end_at_interrupt() -> None:
    """Ctrl-C ends the process, without a word, until it can end as it should.

    In the middle of an import it would be a traceback of some module. Whoever started the
    process may have told it to ignore Ctrl-C, as shells do in the background: so it stays.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_at_interrupt() -> None:
    """Ctrl-C is a KeyboardInterrupt again, if it was that before ``end_at_interrupt``."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def loading() -> Iterator[None]:
    """Import a role within it: the garbage collector stays away from modules, then and later.

    Of a worker they are 290,000 objects. To go through them again and again as they grow took
    0.4 s of its start, and once more at its end 0.3 s; all that was found were 8,000 to free.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
