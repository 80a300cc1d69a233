"""Fixtures of all tests."""

from pathlib import Path

import pytest

from tests.golden import models


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-all", action="store_true", help="all golden prompts, not five per model"
    )
    parser.addoption(
        "--chaos-long", action="store_true", help="fault tests with ten times the cases"
    )
    parser.addoption(
        "--chaos-model",
        choices=("tiny", "demo"),
        default="tiny",
        help="model of the fault tests: a random one, whose steps take milliseconds, or SmolLM2",
    )


@pytest.fixture(scope="session")
def chaos_long(request: pytest.FixtureRequest) -> bool:
    """Whether fault tests run in their long form."""
    return bool(request.config.getoption("--chaos-long"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct (downloaded once)."""
    return models.smollm2_folder()


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The folder of Gemma 3 270M (downloaded once)."""
    return models.gemma3_folder()
