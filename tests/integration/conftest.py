"""Models and clusters that the integration tests share."""

from pathlib import Path

import pytest

from diptych.engine.tiny_model import write_tiny_model

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
