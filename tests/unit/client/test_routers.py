"""Which of several routers a client asks."""

from diptych.client.routers import Routers


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
