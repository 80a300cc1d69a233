"""GGUF as an import format: a file becomes a standard Hugging Face folder, once.

Everything else in Diptych (and Hugging Face transformers) reads the folder.
Needs numpy and gguf, which only the ``worker`` extra installs; import this
package where it is used.
"""

from pathlib import Path

from diptych.errors import ConfigurationError
from diptych.models.gguf_import.architecture import architecture_of
from diptych.models.gguf_import.config import write_config
from diptych.models.gguf_import.gguf_file import GGUFFile
from diptych.models.gguf_import.tensors import write_tensors
from diptych.models.gguf_import.tokenizer import write_tokenizer
from diptych.progress import Progress


def import_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Write the model in ``path`` into the existing, empty ``folder``.

    Blocking; seconds per 100 million parameters. What is written is float32 and
    four bytes per parameter.

    Raises:
        ConfigurationError: not a GGUF file, or something in it is not supported;
            the message names it. ``folder`` may then hold some of the files.
    """
    try:
        _import(path, folder, progress)
    except (ArithmeticError, LookupError, ValueError) as error:  # contradictory metadata
        raise ConfigurationError(f"{path}: cannot be imported: {error!r}") from error


def _import(path: Path, folder: Path, progress: Progress) -> None:
    progress("reading vocabulary", 0.0)
    with GGUFFile(path) as file:
        if file.integer("split.count", 1) != 1:
            raise ConfigurationError(f"{path}: split GGUF files are not supported; merge them")
        architecture = architecture_of(file)
        write_config(file, architecture.name, folder)
        write_tokenizer(file, file.integer(f"{architecture.name}.context_length"), folder)
        progress("reading vocabulary", 1.0)
        write_tensors(file, architecture, folder, progress)
