"""What a batch server cannot do with its settings it says at its start."""

import pytest

from batch_server.config import BatchServerConfig
from diptych import settings
from diptych.errors import ConfigurationError


def load(*args: str) -> BatchServerConfig:
    return settings.load(
        BatchServerConfig, args, prog="diptych batch-server", env_prefix="DIPTYCH_BATCH_SERVER_"
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://there:80a",
        "http://there:65536",
        "http://[::1",
        "http://10.0..1:8000",
        "http://there:8000/v1",
        "ftp://there",
        "http://user:secret@there",
    ],
)
def test_a_router_that_no_request_could_reach_is_one_line(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--router: [^\n]+$") as caught:
        load("--router", url)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("url", ["http://there", "https://there:8000", "http://[::1]:8000"])
def test_a_router_is_named_by_its_address(url: str) -> None:
    assert load("--router", f"{url}/").router == [url]
