"""Models, and the two ends of a transfer, that the integration tests share."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.transfer_rig import Reader, Source, config, open_reader, open_source
from tests.tiny_model import write_tiny_model
from tests.transports import TRANSPORTS

BLOCK_SIZE = 16
TINY_MAX_LEN = 256


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_model(folder, family="llama")
    return folder


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-gemma")
    write_tiny_model(folder, family="gemma3")
    return folder


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def source(transport: str) -> AsyncIterator[Source]:
    async with open_source(config(transport)) as opened:
        yield opened


@pytest.fixture
async def reader(transport: str) -> AsyncIterator[Reader]:
    async with open_reader(config(transport)) as opened:
        yield opened


@pytest.fixture(scope="session")
def wide_model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer with a context that no test fills."""
    folder = tmp_path_factory.mktemp("wide") / "tiny"
    shutil.copytree(tiny_llama, folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["max_position_embeddings"] = 1_000_000
    path.write_text(json.dumps(settings))
    return folder
