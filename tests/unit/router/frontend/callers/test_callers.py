"""Whose a request is, by a file of keys that changes."""

import asyncio
import os
from pathlib import Path

import pytest

from diptych.api_keys import digest
from diptych.errors import ConfigurationError, InvalidApiKeyError
from diptych.request_class import RequestClass
from diptych.tenant import NOBODY, Classes, Limits, Tenant
from router.client_settings import JwtSettings
from router.frontend.callers import watched_file
from router.frontend.callers.api_keys import ApiKeys
from router.frontend.callers.callers import Anybody, KnownCallers
from router.frontend.callers.choice import callers_of


class World:
    """A file of keys, and who reads it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys"
        self._version = 0
        self.num_looks = 0
        self.write(f"alice {digest('one')}\nbob {digest('two')}\n")
        self.callers = KnownCallers(ApiKeys(self.path))

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self._version += 1  # a system's clock may be coarse
        os.utime(self.path, ns=(self._version, self._version))

    async def look(self) -> None:
        """Two looks to their end."""
        done = self.num_looks + 2
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.callers.run())
            async with asyncio.timeout(60):
                while self.num_looks < done:
                    await asyncio.sleep(0.001)
            task.cancel()

    async def knows(self, key: str) -> bool:
        try:
            await self.callers.tenant(f"Bearer {key}")
        except InvalidApiKeyError:
            return False
        return True


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(watched_file, "_LOOK_EVERY_S", 0.0)
    world, look = World(tmp_path), watched_file.WatchedFile.look

    async def counted(file: watched_file.WatchedFile[object]) -> None:
        await look(file)
        world.num_looks += 1

    monkeypatch.setattr(watched_file.WatchedFile, "look", counted)
    return world


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
async def test_a_key_names_its_tenant(world: World, scheme: str) -> None:
    assert await world.callers.tenant(f"{scheme}one") == Tenant("alice")
    assert await world.callers.tenant(f"{scheme}two") == Tenant("bob")


@pytest.mark.parametrize(
    "given",
    [
        *(None, "", "one", "Basic one", "Bearer", "Bearer ", "Bearer three", "Bearer \ud800"),
        "Bearer a.three.b",  # as a token looks, where there are none
    ],
)
async def test_others_are_refused(world: World, given: str | None) -> None:
    with pytest.raises(InvalidApiKeyError) as caught:
        await world.callers.tenant(given)
    assert "three" not in caught.value.message


async def test_a_hash_is_no_key(world: World) -> None:
    assert not await world.knows(digest("one"))


async def test_a_key_that_was_taken_away_is_refused_whoever_called_since(world: World) -> None:
    world.write(f"bob {digest('two')}\ncarol {digest('new')}\n")
    await world.look()
    assert not await world.knows("one")
    assert await world.knows("two")
    assert await world.knows("new")


async def test_no_key_is_empty(world: World) -> None:
    world.write(f"alice {digest('')}\n")
    await world.look()
    with pytest.raises(InvalidApiKeyError):
        await world.callers.tenant("Bearer ")


def test_at_the_start_it_has_to_make_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--api-keys: .*No such file"):
        callers_of(tmp_path / "keys", JwtSettings())
    (tmp_path / "keys").write_text("nonsense")
    with pytest.raises(ConfigurationError, match=r"--api-keys: .*line 1"):
        callers_of(tmp_path / "keys", JwtSettings())


async def test_without_a_file_anybody_may_call() -> None:
    assert isinstance(callers_of(None, JwtSettings()), Anybody)
    assert await Anybody().tenant(None) == NOBODY


class Tokens:
    """Knows everybody, and keeps with what they came."""

    def __init__(self) -> None:
        self.given: list[str] = []

    async def tenant(self, token: str) -> Tenant:
        self.given.append(token)
        return Tenant("alice")

    async def run(self) -> None: ...


async def test_without_keys_every_key_is_read_as_a_token() -> None:
    tokens = Tokens()
    callers = KnownCallers(None, tokens)
    assert await callers.tenant("Bearer opaque") == Tenant("alice")
    assert tokens.given == ["opaque"]


async def test_beside_keys_only_what_looks_like_a_token_is_read_as_one(world: World) -> None:
    tokens = Tokens()
    callers = KnownCallers(ApiKeys(world.path), tokens)
    assert await callers.tenant("Bearer two") == Tenant("bob")
    with pytest.raises(InvalidApiKeyError):
        await callers.tenant("Bearer three")
    assert not tokens.given
    assert await callers.tenant("Bearer a.b.c") == Tenant("alice")
    assert tokens.given == ["a.b.c"]


async def test_what_a_token_does_not_say_of_its_tenant_the_keys_file_does(world: World) -> None:
    terms = "requests_per_minute=2 max_concurrent=4 default_class=batch highest_class=standard"
    world.write(f"alice {digest('one')} {terms}\nalice {digest('other')}\n")

    class Limited(Tokens):
        async def tenant(self, token: str) -> Tenant:
            limits = Limits(max_concurrent=9)
            return Tenant(token[0], limits, Classes(default_class=RequestClass.REALTIME))

    known = KnownCallers(ApiKeys(world.path), Tokens())
    assert await known.tenant("Bearer a.b.c") == await known.tenant("Bearer one")
    named = KnownCallers(ApiKeys(world.path), Limited())
    assert await named.tenant("Bearer x.b.c") == Tenant(
        "x", Limits(max_concurrent=9), Classes(RequestClass.REALTIME)
    )
    own = Tenant("alice", Limits(max_concurrent=9), Classes(RequestClass.REALTIME))
    assert own.over(ApiKeys(world.path).terms_of("alice")) == Tenant(
        "alice", Limits(2, None, 9), Classes(RequestClass.REALTIME, RequestClass.STANDARD)
    )
