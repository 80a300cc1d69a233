"""A process that asks others for their metrics again and again, as Prometheus would.

    python -m tests.bench.scraper ADDRESS...    # until its input ends

It writes a line of JSON at the end: a list of :class:`Scrape`. It is a process of its own so
that no load generator's interpreter lock is in what it measures, and it says how long it waited
for a core itself.
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Final, NamedTuple

_EVERY_S: Final = 0.2
_TIMEOUT_S: Final = 60.0
_SCHEDULING: Final = Path("/proc/self/schedstat")


class Scrape(NamedTuple):
    """One answer to ``/metrics``, from the connection on."""

    process: int  # which of those that were asked
    took_s: float
    waited_s: float  # of that, the scraper could have run and had no core


def scrape(process: int, address: str) -> Scrape:
    host, _, port = address.rpartition(":")
    waited_s, began_s = _waited_s(), time.monotonic()
    connection = HTTPConnection(host, int(port), timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert response.status == 200
        assert response.read()
    finally:
        connection.close()
    return Scrape(process, time.monotonic() - began_s, _waited_s() - waited_s)


def _waited_s() -> float:
    """For a core, since this process began; 0 where the kernel does not say."""
    if not _SCHEDULING.exists():
        return 0.0
    return int(_SCHEDULING.read_text().split()[1]) / 1e9


@contextmanager
def scraping(addresses: Sequence[str]) -> Iterator[list[Scrape]]:
    """Meanwhile all of them are scraped; what came of it is in the list once the block is left."""
    command = [sys.executable, "-m", "tests.bench.scraper", *addresses]
    scrapes: list[Scrape] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield scrapes
        finally:
            told, _ = process.communicate()
    scrapes += [Scrape(*each) for each in json.loads(told)]


def main(addresses: Sequence[str]) -> None:
    scrapes = []
    while not select.select([sys.stdin], [], [], _EVERY_S)[0]:
        scrapes += [scrape(number, address) for number, address in enumerate(addresses)]
    print(json.dumps(scrapes))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
