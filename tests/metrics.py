"""Reading what a process says of itself in Prometheus' text format."""

import urllib.request

_TIMEOUT_S = 60.0
_BLOCKS = 'diptych_kv_blocks{owner="'


def scrape(address: str) -> dict[str, float]:
    """Samples of the process whose metrics are served at ``address``, by ``name{labels}``.

    Blocks: a test that shares its event loop with the process asks from a thread.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as reply:
        return parse(reply.read().decode())


def parse(text: str) -> dict[str, float]:
    """Samples by ``name{labels}`` as exposed."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {key: float(value) for key, _, value in lines if key}


def blocks_of(samples: dict[str, float]) -> dict[str, int]:
    """KV blocks by owner, of a worker's samples."""
    return {
        key.removeprefix(_BLOCKS).split('"')[0]: int(value)
        for key, value in samples.items()
        if key.startswith(_BLOCKS)
    }
