"""Models of the Hugging Face hub: fetched into its client's own cache, with progress."""

import io
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.errors import ConfigurationError
from diptych.progress import AbandonedError, Progress

if TYPE_CHECKING:
    from tqdm import tqdm

_HUB_FILES = ["*.json", "*.jinja", "LICENSE*", "NOTICE*"]
_NOT_OURS = ["*/*", "*.bin.index.json"]  # of other formats of the same weights
_INDEX_NAME, _SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


def hub_folder(model: str, cache_dir: Path, progress: Progress) -> Path:
    """Fetch ``org/name``: the small files, then the weights that its index names and no others.

    Blocking. ``progress`` may raise AbandonedError, which ends it soon: what was fetched whole
    is not fetched again.

    Raises:
        ConfigurationError: the hub does not have it, or cannot be asked; one line.
    """
    from huggingface_hub import snapshot_download

    stage = f"fetching {model} from the hub"
    progress(stage, 0.0)
    fetch = partial(snapshot_download, model, cache_dir=cache_dir.expanduser() / "hub")
    silent = _bars(lambda done_ratio: progress(stage, 0.0))
    told = _bars(lambda done_ratio: progress(stage, done_ratio))
    try:
        folder = Path(
            fetch(allow_patterns=_HUB_FILES, ignore_patterns=_NOT_OURS, tqdm_class=silent)
        )
        # The same revision, though the hub may have a newer one by now.
        fetch(allow_patterns=_weight_files(folder), revision=folder.name, tqdm_class=told)
    except AbandonedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the hub's client and its HTTP raise
        lines = str(error).strip().splitlines()
        detail = lines[0] if lines else type(error).__name__
        raise ConfigurationError(
            f"model {model!r}: no such folder, and the hub: {detail}"
        ) from None
    progress(stage, 1.0)
    return folder


def _bars(report: Callable[[float], None]) -> "type[tqdm[Any]]":
    """Bars of the hub's client, drawn nowhere: they report how much of all bytes is there.

    ``report`` is called by one thread at a time; what it raises ends the download.
    """
    from tqdm import tqdm

    turn = threading.Lock()
    most = 0.0

    class Reporting(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            shown = super().update(n)
            with turn:
                if self.unit == "B" and self.total:  # else it counts files
                    most = max(most, min(1.0, self.n / self.total))
                report(most)
            return shown

        def display(self, *args: Any, **options: Any) -> None: ...

    return Reporting


def _weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights. Raises OSError or ValueError."""
    index = folder / _INDEX_NAME
    if not index.is_file():
        return [_SINGLE_NAME]
    try:
        names = json.loads(index.read_text("utf-8"))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{_INDEX_NAME} has no weight_map") from None
