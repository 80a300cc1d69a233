"""The model of the fault tests: a tiny one unless told, so that a step takes milliseconds."""

from pathlib import Path

import pytest

from diptych.engine.tiny_model import write_tiny_model
from tests.golden import models


@pytest.fixture(scope="session")
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.config.getoption("--chaos-model") == "demo":
        return models.smollm2_folder()
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, family="llama")
    return folder
