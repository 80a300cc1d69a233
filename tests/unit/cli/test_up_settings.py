"""What ``diptych up`` refuses before it starts anything."""

import pytest

from diptych.cli.up import run
from diptych.errors import ConfigurationError


@pytest.mark.parametrize(
    "args",
    [
        ["--router-args", "--api-keys keys"],
        ["--router-args", "--log-level debug --public-tls.certificate=a --public-tls.key=b"],
        ["--worker-args", "--tls.ca ca.pem"],
    ],
)
def test_locks_are_not_for_a_cluster_that_it_starts(args: list[str]) -> None:
    """It would wait for ever: it has no key to ask its router with."""
    with pytest.raises(ConfigurationError, match=rf"{args[0]}: --[a-z.-]+: not with diptych up"):
        run(args)
