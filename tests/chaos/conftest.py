"""The model of the fault tests: a tiny one unless told, so that a step takes milliseconds."""

from pathlib import Path

import pytest

from tests.chaos.load import DEMO_STEP_S, STEP_S
from tests.golden import models
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def chaos_demo(request: pytest.FixtureRequest) -> bool:
    """Whether the fault tests' model is SmolLM2."""
    return bool(request.config.getoption("--chaos-model") == "demo")


@pytest.fixture(scope="session")
def step_s(chaos_demo: bool) -> float:
    """Longer than any step of the fault tests' model, also on a busy machine, s."""
    return DEMO_STEP_S if chaos_demo else STEP_S


@pytest.fixture(scope="session")
def tiny_model(chaos_demo: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if chaos_demo:
        return models.smollm2_folder()
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, family="llama")
    return folder
