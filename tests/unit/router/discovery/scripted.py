"""Listening to a source whose clock, or whose world, ends it."""

from router.discovery.source import Discovery, Targets


class ScriptIsOverError(BaseException):
    """What the source asks for next is not in the test's script. No source makes good for it."""


async def told_by(discovery: Discovery) -> list[Targets]:
    """All that it tells until the script is over; it may not stop by itself."""
    told: list[Targets] = []
    try:
        async for each in discovery.targets():
            told.append(each)  # noqa: PERF401 - it ends with an error
    except ScriptIsOverError:
        return told
    raise AssertionError("it stopped by itself")
