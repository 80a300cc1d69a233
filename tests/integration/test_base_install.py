"""Router, client and command line run without the packages of the extra ``worker``."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Run first in the child: what the base install lacks cannot be imported.
BLOCK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if {{name, name.partition(".")[0]}} & set({absent!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def absent() -> list[str]:
    """Import names of what only the extras bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["worker"]
    names = [requirement.split(">")[0].split("=")[0] for requirement in extra]
    assert "torch" in names
    return [*names, "ucxx", "transformers", "sentencepiece", "psutil", "diptych.engine"]


def run_without_extras(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in an interpreter that has the base install only."""
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(absent=absent()) + code, *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )


@pytest.mark.parametrize(
    "module",
    [
        "router.app",
        "router.config",
        "diptych.client",
        "diptych.cli.up",
        "diptych.cli.generate",
        "diptych.cli.chat",
        "diptych.cli.model",
        "diptych.cli.local_cluster",
        "diptych.models.source",
        "diptych.text.tokenizer",
        "diptych.text.chat_template",
    ],
)
def test_a_module_of_the_base_install_imports(module: str) -> None:
    done = run_without_extras(f"import {module}\nprint(len(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_the_command_line_runs() -> None:
    code = "from diptych.cli import main\nsys.exit(main(sys.argv[1:]))"
    assert "commands:" in run_without_extras(code, "--help").stdout
    assert "usage: diptych up" in run_without_extras(code, "up", "--help").stdout


def test_importing_a_gguf_names_what_is_missing(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    code = "from diptych.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = run_without_extras(
        code, "model", "fetch", str(gguf), "--cache-dir", str(tmp_path / "cache")
    )
    assert done.returncode == 2
    assert "pip install -e '.[worker]'" in done.stderr
    assert "Traceback" not in done.stderr
