"""Where ``diptych`` begins: before anything that takes long to import."""

import importlib
from collections.abc import Callable, Sequence

from diptych.loading import end_at_interrupt, open_standard_files


def main(args: Sequence[str] | None = None) -> int:
    """Run ``diptych`` with ``args`` (``sys.argv[1:]``); the exit code."""
    open_standard_files()
    end_at_interrupt()
    run: Callable[[Sequence[str] | None], int] = importlib.import_module("diptych.cli.commands").run
    return run(args)
