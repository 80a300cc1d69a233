"""The tiny model of the fault tests: a step takes milliseconds."""

from pathlib import Path

import pytest

from diptych.engine.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, family="llama")
    return folder
