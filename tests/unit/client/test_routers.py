"""Which of several routers a client asks."""

import pytest

from diptych.client import BatchClient
from diptych.client.routers import Routers
from diptych.errors import ConfigurationError


async def test_it_stays_with_one_until_that_fails_and_names_the_next() -> None:
    routers = Routers("r:1, r:2", None)
    first = routers.asked
    assert routers.address == "r:1"
    routers.leave(first)
    assert routers.address == "r:2"
    routers.leave(first)  # another call's failure
    assert routers.address == "r:2"
    routers.leave(routers.asked)
    assert routers.address == "r:1"
    await routers.close()


@pytest.mark.parametrize("addresses", ["", " ", "r:1,", "r:1,,r:2"])
def test_an_address_that_is_missing_is_refused(addresses: str) -> None:
    with pytest.raises(ConfigurationError, match="expected host:port, or several"):
        Routers(addresses, None)


@pytest.mark.parametrize("address", ["r:65536", "r:0099999", "[::1]:" + "9" * 5000])
def test_a_port_that_is_none_is_refused(address: str) -> None:
    """gRPC would go to another, with the key and all that is said."""
    for make in (lambda: Routers(f"r:65535,{address}", None), lambda: BatchClient(address)):
        with pytest.raises(ConfigurationError, match="expected host:port, the port up to 65535"):
            make()


def test_an_address_of_another_protocol_is_refused_before_it_is_looked_for() -> None:
    """gRPC would ask DNS for it, and the client again and again."""
    for address in ("http://r:8000", "r:1,https://user:secret@r:8000"):
        with pytest.raises(ConfigurationError, match=r"https?://: expected host:port") as caught:
            Routers(address, None)
        assert "secret" not in caught.value.message
