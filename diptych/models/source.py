"""Where a model comes from: turns ``--model`` into a Hugging Face folder on disk.

Every process of a cluster resolves the same setting for itself; what has to be
prepared is prepared once per cache, see :mod:`diptych.models.cache`. Does not
read weights or import torch; resolving a folder, or what is already imported,
needs the base install only.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from diptych.errors import ConfigurationError
from diptych.models import cache as model_cache
from diptych.models.demo import DEMO_NAME, demo_folder
from diptych.models.hub import hub_folder
from diptych.models.importer import load_importer
from diptych.progress import Progress, silent

DEFAULT_CACHE_DIR = Path("~/.cache/diptych")

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?")


class ResolvedModel(NamedTuple):
    """``folder`` holds config.json; ``name`` is what clients call the model."""

    folder: Path
    name: str


def resolve(
    model: str,
    cache_dir: Path = DEFAULT_CACHE_DIR,
    progress: Progress = silent,
    *,
    texts_only: bool = False,
) -> ResolvedModel:
    """Find ``model``: a folder, a .gguf file, ``demo``, or a hub id ``org/name[@revision]``.

    Blocking; downloads and imports what is missing. A revision is no part of the name.
    ``texts_only``: no weights are read, and those of a hub id are not downloaded. A .gguf
    file and the demo, whose tokenizer is in the same file, are imported whole.

    Raises:
        ConfigurationError: there is no such model, or it cannot be fetched or
            imported; one line.
    """
    if not model:
        raise ConfigurationError("the model's name is empty")
    if model == "demo":
        return ResolvedModel(demo_folder(_expanded(cache_dir, "model cache"), progress), DEMO_NAME)
    path = _expanded(Path(model), f"model {model!r}")
    if path.suffix.lower() == ".gguf":
        return ResolvedModel(imported_folder(path, cache_dir, progress), _readable(path.stem))
    if (folder := _folder_at(path, model)) is not None:
        return ResolvedModel(folder, folder.name)
    if (hub_id := _HUB_ID.fullmatch(model)) is not None:
        name, revision = hub_id.groups()
        cache = _expanded(cache_dir, "model cache")
        folder = hub_folder(name, cache, progress, revision, texts_only=texts_only)
        return ResolvedModel(folder, name)
    raise ConfigurationError(
        f"model {model!r}: not a folder, not a .gguf file, not 'demo', and not a hub id "
        "org/name or org/name@revision"
    )


def _readable(name: str) -> str:
    """Of a name that is not all UTF-8, ``?`` for what is no character."""
    return name.encode(errors="replace").decode()


def _expanded(path: Path, name: str) -> Path:
    """Without ~. Raises ConfigurationError: nobody knows whose home that is."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{name}: {error}") from None


def _folder_at(path: Path, model: str) -> Path | None:
    """The folder of a model; None: there is none. Raises ConfigurationError: it cannot be read."""
    try:
        if not path.is_dir():
            return None
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"model {model!r}: the folder has no config.json")
        return path.resolve()
    except OSError as error:
        raise ConfigurationError(f"model {model!r}: {error.strerror}") from None


def imported_folder(path: Path, cache_dir: Path, progress: Progress) -> Path:
    """The folder that the GGUF file ``path`` was, or is now, imported into. Blocking.

    The same path with the same size and time of change is the same model.

    Raises:
        ConfigurationError: there is no such file or it cannot be imported.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigurationError(f"model {str(path)!r}: {error.strerror}") from None
    identity = f"{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(identity)).hexdigest()
    key = f"{_readable(path.stem)}-{digest[:12]}"
    cache = _expanded(cache_dir, "model cache")
    return model_cache.cached_folder(
        cache, key, lambda folder: load_importer()(path, folder, progress), progress
    )
