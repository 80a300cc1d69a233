"""When a file that changed is taken over, and how often it is read."""

import asyncio
import codecs
import os
import threading
from pathlib import Path

import pytest

from diptych.api_keys import digest, read_keys
from diptych.tenant import Tenant
from router.frontend.callers.watched_file import WatchedFile

LOOK_S = 1.0


class World:
    """A file of a number, and who watches it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "file"
        self.now_s = 1000.0
        self.parsed: list[str] = []
        self.write("1", age_s=60.0)
        self.file: WatchedFile[int] = WatchedFile(
            "file", self.path, self._parse, what="numbers", now=lambda: self.now_s
        )
        self.parsed.clear()

    def _parse(self, text: str) -> int:
        self.parsed.append(text[:10])
        if not text.isdigit():
            raise ValueError("is no number")
        return int(text)

    def write(self, text: str, *, age_s: float = 0.0) -> None:
        self.path.write_text(text)
        os.utime(self.path, (self.now_s - age_s, self.now_s - age_s))

    async def look(self) -> int:
        """The content after the next look."""
        self.now_s += LOOK_S
        await self.file.look()
        return self.file.content


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_one_that_is_a_second_old_is_taken_over_at_the_first_look(world: World) -> None:
    world.write("2")
    assert world.file.content == 1
    assert await world.look() == 2


async def test_one_that_is_being_written_to_is_not(world: World) -> None:
    """``>`` leaves it empty for a moment, and a large one is written piece by piece."""
    for text in ("", "2"):
        world.write(text, age_s=-0.9)
        assert await world.look() == 1
    assert not world.parsed
    assert await world.look() == 2


async def test_one_that_never_stands_still_is_taken_over_at_the_third_look(world: World) -> None:
    taken = []
    for number in range(2, 11):
        world.write(str(number), age_s=-0.9)
        taken.append(await world.look())
    assert taken == [1, 1, 4, 4, 4, 7, 7, 7, 10]


async def test_one_that_is_half_written_when_it_is_read_is_read_again(world: World) -> None:
    for text in ("2", "22", "222x"):
        world.write(text, age_s=-0.9)
        assert await world.look() == 1
    assert world.parsed == ["222x"]
    world.write("2223", age_s=-0.9)
    assert await world.look() == 1
    assert await world.look() == 2223


async def test_one_of_the_future_is_read_once_as_it_is_and_once_when_it_is_old(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world.write("2", age_s=-10.0)
    assert [await world.look() for _ in range(20)] == [1] * 2 + [2] * 18
    assert world.parsed == ["2", "2"]
    assert [record.message for record in caplog.records] == ["numbers taken over"]


@pytest.mark.parametrize("broken", ["nonsense", None, "x" * (2**22 + 1)])
async def test_one_that_makes_no_sense_changes_nothing_is_told_once_and_read_once(
    world: World, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    if broken is None:
        world.path.unlink()
    else:
        world.write(broken)
    assert [await world.look() for _ in range(4)] == [1] * 4
    assert [record.message for record in caplog.records] == ["numbers not taken over"]
    assert len(world.parsed) == (broken == "nonsense")
    world.write("2")
    assert await world.look() == 2


async def test_one_that_comes_back_as_it_was_is_known_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    aside = world.path.with_name("aside")
    for _ in range(2):
        caplog.clear()
        world.path.rename(aside)
        assert await world.look() == 1
        aside.rename(world.path)
        assert await world.look() == 1
        assert [record.message for record in caplog.records] == ["numbers not taken over"]


async def test_one_is_read_no_more_often_than_it_changes(world: World) -> None:
    content = world.file.content
    assert all([await world.look() is content for _ in range(10)])
    assert not world.parsed


async def test_one_that_could_not_be_read_is_read_once_it_can_be(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its rights are set only after it was put in place."""
    world.write("2")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_text", _not_permitted)
        assert await world.look() == 1
    assert await world.look() == 2


async def test_nothing_waits_for_a_disk_that_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def slow_stat(path: Path) -> os.stat_result:
        assert answers.wait(30)
        return os.stat(path)

    world.write("2")
    with monkeypatch.context() as slow:
        slow.setattr(Path, "stat", slow_stat)
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(world.look())
            await asyncio.sleep(0.05)
            assert not looking.done()
            assert world.file.content == 1
            answers.set()
    assert looking.result() == 2


def _not_permitted(path: Path) -> str:
    raise PermissionError(13, "Permission denied")


def test_a_file_may_begin_with_the_mark_of_utf8(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(codecs.BOM_UTF8 + f"alice {digest('k')}\n".encode())
    file = WatchedFile("api-keys", path, read_keys, what="keys")
    assert file.content == {digest("k"): Tenant("alice")}
