"""``diptych model fetch`` and ``diptych model import``: have a model on disk ahead of time."""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg

from diptych import settings
from diptych.errors import ConfigurationError
from diptych.models.importer import load_importer
from diptych.models.source import DEFAULT_CACHE_DIR, ResolvedModel, resolve
from diptych.progress import ConsoleProgress, Progress, abandonable

_USAGE = """usage: diptych model fetch MODEL [--cache-dir DIR]
       diptych model import FILE.gguf [--to FOLDER] [--cache-dir DIR]

fetch   download or import a model into the cache, so that no start has to wait for it
import  convert a GGUF file to a standard folder"""


class FetchConfig(BaseModel):
    """Download or import a model into the cache. Prints its folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: CliPositionalArg[str] = Field(
        min_length=1, description="Hugging Face folder, .gguf file, hub id, or demo."
    )
    cache_dir: Path = Field(DEFAULT_CACHE_DIR, description="The cache.")


class ImportConfig(BaseModel):
    """Convert a GGUF file to a standard Hugging Face folder. Prints the folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: CliPositionalArg[Path] = Field(description="The .gguf file.")
    to: Path | None = Field(None, description="Folder to write, new. Unset: one in the cache.")
    cache_dir: Path = Field(DEFAULT_CACHE_DIR, description="The cache.")


def run(args: list[str]) -> int:
    """Run the subcommand; 0, or 2 with its usage."""
    if not args or args[0] not in ("fetch", "import"):
        print(_USAGE)  # noqa: T201
        return 0 if args and args[0] in ("-h", "--help") else 2
    name, rest = args[0], args[1:]
    prog, prefix = f"diptych model {name}", f"DIPTYCH_MODEL_{name.upper()}_"
    with ConsoleProgress() as shown, _until_interrupted(shown) as progress:
        if name == "fetch":
            fetch = settings.load(FetchConfig, rest, prog=prog, env_prefix=prefix)
            folder = resolve(fetch.model, fetch.cache_dir, progress).folder
        else:
            convert = settings.load(ImportConfig, rest, prog=prog, env_prefix=prefix)
            folder = _import(convert, progress)
    print(folder)  # noqa: T201
    return 0


def fetch_with_progress(model: str) -> ResolvedModel:
    """Have ``model`` in the cache before several processes look for it.

    Raises:
        ConfigurationError: there is no such model.
    """
    with ConsoleProgress(sys.stderr) as shown, _until_interrupted(shown) as progress:
        return resolve(model, progress=progress)


@contextmanager
def _until_interrupted(progress: Progress) -> Iterator[Progress]:
    """The same, which ends at Ctrl-C what threads fetch: else it would be waited for to its end."""
    interrupted = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield progress
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield abandonable(progress, interrupted)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _import(config: ImportConfig, progress: Progress) -> Path:
    if config.file.suffix.lower() != ".gguf":
        raise ConfigurationError(f"--file: {config.file} is not a .gguf file")
    if config.to is None:
        return resolve(str(config.file), config.cache_dir, progress).folder
    try:
        return _import_to(config.to, config.file, progress)
    except OSError as error:
        raise ConfigurationError(f"--to: {config.to}: {error.strerror or error}") from None


def _import_to(folder: Path, file: Path, progress: Progress) -> Path:
    """The folder, which is there once it is whole. Raises OSError, ConfigurationError."""
    if not file.is_file():
        raise ConfigurationError(f"--file: no such file: {file}")
    if folder.exists():
        raise ConfigurationError(f"--to: {folder} exists")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        load_importer()(file, partial, progress)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
