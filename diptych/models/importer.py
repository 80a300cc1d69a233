"""The seam to :mod:`diptych.models.gguf_import`, whose packages the base install lacks."""

from pathlib import Path
from typing import Protocol

from diptych.errors import ConfigurationError
from diptych.progress import Progress


class Importer(Protocol):
    """See :func:`diptych.models.gguf_import.import_gguf`."""

    def __call__(self, path: Path, folder: Path, progress: Progress) -> None: ...


def load_importer() -> Importer:
    """The GGUF importer; raises ConfigurationError if its packages are not installed."""
    try:
        from diptych.models.gguf_import import import_gguf
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"importing a GGUF model needs {error.name}: "
            "pip install -e '.[worker]' (in Diptych's clone)"
        ) from None
    return import_gguf
