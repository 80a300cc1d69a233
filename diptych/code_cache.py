"""Where compiled kernels are kept between processes.

numba looks only at the file of the function it compiles, not at those that the
function calls, so code from before an upgrade could be found again. Here each
version of the sources has a folder of its own.
"""

import os
from functools import cache
from pathlib import Path

import xxhash

_DEFAULT_BASE = Path("~/.cache/diptych/kernels")


@cache
def code_cache(sources: Path) -> Path | None:
    """The folder for this version of the modules in ``sources``; None if it cannot be written.

    It lies in NUMBA_CACHE_DIR, where that is set, or in the user's cache.
    """
    digest = xxhash.xxh3_64()
    for path in sorted(sources.glob("*.py")):
        digest.update(path.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or _DEFAULT_BASE
    try:
        folder = Path(base).expanduser() / digest.hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return folder if os.access(folder, os.W_OK) else None
