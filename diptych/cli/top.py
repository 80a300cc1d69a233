"""``diptych top``: the pools of a cluster, live in the terminal."""

import asyncio
import signal
import sys
import time

from pydantic import Field
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from diptych import settings
from diptych.cli.connection import RouterConnection
from diptych.cli.top_screen import Sample, printable, screen
from diptych.client import DiptychClient
from diptych.errors import ConfigurationError, DiptychError
from diptych.process import EXIT_FAILED

_PATIENCE_S = 10.0
_PLAIN_COLUMNS = 200  # of what no terminal shows: lines are cut nowhere


class TopConfig(RouterConnection):
    """Watch the pools of a cluster: KV blocks by owner, queues, latencies, transfers.

    Without a terminal it is shown once, as plain text. Ctrl-C ends it.
    """

    once: bool = Field(False, description="Show it once, as plain text, and end.")
    interval_s: float = Field(1.0, ge=0.5, description="Time between two looks, s.")


def run(args: list[str]) -> int:
    """Watch until Ctrl-C; 0, or 1 if the router does not tell, or cannot be reached at first."""
    config = settings.load(TopConfig, args, prog="diptych top", env_prefix="DIPTYCH_TOP_")
    is_once = config.once or not sys.stdout.isatty() or _terminal().is_dumb_terminal
    try:
        if is_once:
            asyncio.run(_show_once(config))
        else:
            asyncio.run(_watch(config))
    except ConfigurationError:
        raise
    except DiptychError as error:
        print(f"diptych top: {_line(config, error)}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        if is_once:  # what was asked for has not been shown
            raise
    return 0


async def _show_once(config: TopConfig) -> None:
    """Raises DiptychError."""
    async with config.client() as client:
        sample = await _look(client)
    console = Console(
        file=sys.stdout, force_terminal=False, width=_PLAIN_COLUMNS, color_system=None
    )
    with console.capture() as captured:
        console.print(screen(sample, None, has_bars=False))
    for line in captured.get().splitlines():
        print(line.rstrip())  # noqa: T201


async def _watch(config: TopConfig) -> None:
    """Until cancelled, which SIGTERM does too: the terminal is given back as it was.

    Raises DiptychError: the first look failed; later ones are shown and tried again.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    before, failure = None, ""
    async with config.client() as client:
        now = await _look(client)
        with Live(console=_terminal(), screen=True, auto_refresh=False) as live:
            while True:
                shown = screen(now, before, has_bars=True)
                live.update(Group(Text(failure, style="bold red"), shown), refresh=True)
                await asyncio.sleep(config.interval_s)
                try:
                    before, now, failure = now, await _look(client), ""
                except DiptychError as error:
                    failure = _line(config, error)


def _terminal() -> Console:
    """Standard output, which is one: the environment may say otherwise, for programs that guess."""
    return Console(force_terminal=True, force_interactive=True)


async def _look(client: DiptychClient) -> Sample:
    """Raises DiptychError."""
    report = await client.cluster(timeout_s=_PATIENCE_S)
    return Sample(report, time.monotonic(), client.router)


def _line(config: TopConfig, error: DiptychError) -> str:
    """What went wrong, and where."""
    return f"{config.address}: {error.reason}: {printable(' '.join(error.message.split()))}"
