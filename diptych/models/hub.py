"""Models of the Hugging Face hub: fetched into its client's own cache, with progress."""

import io
import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.errors import ConfigurationError
from diptych.progress import AbandonedError, Progress

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

_HUB_FILES = ["*.json", "*.jinja", "LICENSE*", "NOTICE*"]
_NOT_OURS = ["*/*", "*.bin.index.json"]  # of other formats of the same weights
_IN_FOLDERS = ["1_Pooling/config.json", "additional_chat_templates/*.jinja"]  # ours all the same
_MAX_CHARACTERS = 400  # of what the hub says, a line
_MAY_NEED_TOKEN = ("GatedRepoError", "RepositoryNotFoundError")
_HINT = " (the variable HF_TOKEN holds a token, where it needs one)"
_INDEX_NAME, _SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


def hub_folder(
    model: str,
    cache_dir: Path,
    progress: Progress,
    revision: str | None = None,
    *,
    texts_only: bool = False,
) -> Path:
    """Fetch ``org/name``: the small files, then the weights and what else is used, no others.

    Blocking. ``revision`` is a branch, a tag or a commit; None: the newest. ``texts_only``
    leaves the weights where they are; who wants them gets them into the same folder later.
    A hub that cannot be reached is not needed where all that is used was fetched before.
    ``progress`` may raise AbandonedError, which ends it soon: what was fetched whole is not
    fetched again.

    Raises:
        ConfigurationError: the hub does not have it, or cannot be asked; one line.
    """
    from huggingface_hub import snapshot_download

    named = model if revision is None else f"{model}@{revision}"
    stage = f"fetching {named} from the hub"
    progress(stage, 0.0)
    fetch = partial(snapshot_download, model, cache_dir=cache_dir.expanduser() / "hub")
    told = _Told(partial(progress, stage))
    try:
        folder = _fetch_used(fetch, told, revision, texts_only=texts_only)
    except Exception as error:  # noqa: BLE001 - whatever the hub's client and its HTTP raise
        if told.is_abandoned:
            raise AbandonedError from None
        known = _used_before(error, fetch, told, revision, texts_only=texts_only)
        if known is None:
            raise ConfigurationError(
                f"model {named!r}: no such folder, and the hub: {_told_by(error)}"
            ) from None
        extra = {"model": named, "error": _told_by(error)}
        logger.warning("the hub cannot be reached: what was fetched before is used", extra=extra)
        folder = known
    progress(stage, 1.0)
    return folder


def _fetch_used(
    fetch: Callable[..., str], told: "_Told", revision: str | None, *, texts_only: bool
) -> Path:
    """The folder of what is used. Raises whatever the hub's client does."""
    folder = Path(
        fetch(
            allow_patterns=_HUB_FILES,
            ignore_patterns=_NOT_OURS,
            revision=revision,
            tqdm_class=_bars(told),
        )
    )
    names = list(_IN_FOLDERS)
    if not texts_only:
        told.num_bytes = _num_bytes(folder)
        names += _weight_files(folder)
    # The same revision, though the hub may have a newer one by now.
    fetch(allow_patterns=names, revision=folder.name, tqdm_class=_bars(told))
    return folder


def _used_before(
    error: Exception,
    fetch: Callable[..., str],
    told: "_Told",
    revision: str | None,
    *,
    texts_only: bool,
) -> Path | None:
    """What was fetched before, whole; None: it was not, or ``error`` is the hub's own word.

    The hub's client looks by itself, but not into what an older one left, or another program:
    without a list of the hub's files it asks for that, though none is missing.
    """
    from httpx import TransportError

    if not isinstance(error, ConnectionError | TransportError):
        return None
    try:
        local = partial(fetch, local_files_only=True)
        folder = _fetch_used(local, told, revision, texts_only=texts_only)
        names = ["config.json", *([] if texts_only else _weight_files(folder))]
    except (OSError, ValueError):
        return None
    return folder if all((folder / name).is_file() for name in names) else None


def _told_by(error: Exception) -> str:
    """In one line: of what the hub answers with the first says no more than a number."""
    kind = type(error).__name__
    told = " ".join(str(error).split())[:_MAX_CHARACTERS] or kind
    return f"{told}{_HINT}" if kind in _MAY_NEED_TOKEN else told


class _Told:
    """How much of the weights is there, as one thread at a time reports it."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self.num_bytes = 0  # of all weights; 0: not known, so nothing is told
        self.is_abandoned = False
        self._report = report
        self._most = 0.0
        self._turn = threading.Lock()

    def has(self, num_bytes: float) -> None:
        """So many are there. Raises AbandonedError, also where the hub's own threads drop that."""
        with self._turn:
            if self.num_bytes:
                self._most = max(self._most, min(1.0, num_bytes / self.num_bytes))
            try:
                self._report(self._most)
            except AbandonedError:
                if not self.is_abandoned:
                    self.is_abandoned = True
                    _end_xet()
                raise


def _end_xet() -> None:
    """End what its library in Rust downloads, which does not hear of errors in Python."""
    with suppress(Exception):
        from huggingface_hub.utils import _xet

        _xet.abort_xet_session()  # type: ignore[no-untyped-call,unused-ignore]


def _bars(told: _Told) -> "type[tqdm[Any]]":
    """Bars of the hub's client, drawn nowhere: they tell how many bytes are there."""
    from tqdm import tqdm

    class Reporting(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)  # of a subclass that the hub's client has
            # A bar that is disabled, as the environment may ask, counts nothing.
            super().__init__(*args, **{**options, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            told.has(self.n if self.unit == "B" else 0)  # else it counts files
            return shown

        def display(self, *args: Any, **options: Any) -> None: ...

    return Reporting


def _num_bytes(folder: Path) -> int:
    """Of all weights, as their index says; 0: it does not."""
    try:
        num = json.loads((folder / _INDEX_NAME).read_text("utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return num if isinstance(num, int) and num > 0 else 0


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
