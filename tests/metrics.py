"""Reading what a process says of itself in Prometheus' text format."""

import re
import urllib.request
from pathlib import Path

from tests.packages import PACKAGES

_ROOT = Path(__file__).parents[1]
_MADE = re.compile(
    r"\.(?:counters?|gauges?|histograms?|labelled_counter|labelled_histogram|loop_histogram|read_gauges?)"
    r'\(\s*"([a-z_]+)"'
)
_TIMEOUT_S = 60.0
_BLOCKS = 'diptych_kv_blocks{owner="'


def scrape(address: str) -> dict[str, float]:
    """Samples of the process whose metrics are served at ``address``, by ``name{labels}``.

    Blocks: a test that shares its event loop with the process asks from a thread.
    """
    return parse(_text(address))


def unmoved(address: str) -> dict[str, bool]:
    """Of each family that the process tells, whether all its samples are 0 still."""
    is_unmoved, name = {}, ""
    for line in _text(address).splitlines():
        if line.startswith("# TYPE "):
            name = line.split()[2].removesuffix("_total")
            if not name.endswith("_created"):
                is_unmoved[name] = True
        elif not line.startswith("#") and name in is_unmoved:
            is_unmoved[name] &= float(line.rpartition(" ")[2]) == 0.0
    return is_unmoved


def made_in_code() -> set[str]:
    """The names, without prefix, of all metrics that are made under a name of their own."""
    code = [path for package in PACKAGES for path in (_ROOT / package).rglob("*.py")]
    found = [name for path in code for name in _MADE.findall(path.read_text())]
    return {name.removesuffix("_total") for name in found}


def is_asserted(name: str, test: str) -> bool:
    """Whether the text of a test has this metric's whole name, and not to find it at 0."""
    ends = r"(?:_total|_count|_sum)?"
    found = rf"""["'](?:diptych_)?{name}{ends}(?:\{{|["'](?!\s*[\])]+ == 0(?:\.0)?(?![.\d])))"""
    return re.search(found, test) is not None


def _text(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as reply:
        text: str = reply.read().decode()
        return text


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
