"""Each run searches elsewhere, and says how to search there again.

``--hypothesis-profile long``: the model searches for an hour or two.
"""

import secrets

import pytest

_SEED = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--hypothesis-seed")
    known = given is not None and given != "random"
    config.stash[_SEED] = int(given) if known else secrets.randbelow(2**32)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Also where all went well: a search that found nothing can be repeated too."""
    seed = terminalreporter.config.stash[_SEED]
    terminalreporter.write_line(f"tests/protocol searched with --hypothesis-seed={seed}")


@pytest.fixture(scope="session")
def search_seed(pytestconfig: pytest.Config) -> int:
    """Where the searches of this run begin."""
    return pytestconfig.stash[_SEED]
