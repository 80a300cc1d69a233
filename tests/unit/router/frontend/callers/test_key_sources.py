"""Keys of an issuer that change, are asked for, and do not come."""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from diptych.errors import ConfigurationError, InvalidApiKeyError
from diptych.tenant import Tenant
from router.client_settings import JwtSettings
from router.frontend.callers import key_sources, watched_file
from router.frontend.callers.choice import callers_of
from router.frontend.callers.issued_tokens import IssuedTokens
from router.frontend.callers.key_sources import FetchedKeys, FileKeys
from router.frontend.callers.tokens import Expected, TokenReader
from tests.issuer import AUDIENCE, ISSUER, Signer, key_set

EXPECTED = Expected(ISSUER, [AUDIENCE], ("ES256",), "sub", None, 0)
OLD, NEW = Signer("old"), Signer("new")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Issuer:
    """Answers when the test lets it."""

    def __init__(self) -> None:
        self.answer: bytes | Exception = key_set(OLD)
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self) -> bytes:
        self.num_asked += 1
        await self.may_answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def run(self) -> None:
        pass


class World:
    def __init__(self, refresh_s: float = 1000.0) -> None:
        self.clock = Clock()
        self.issuer = Issuer()
        self.keys = FetchedKeys(self.issuer, refresh_s, self.clock)
        self.tokens = IssuedTokens(TokenReader(EXPECTED, lambda: 0.0), self.keys, self.clock)

    async def knows(self, signer: Signer) -> bool:
        try:
            assert await self.tokens.tenant(signer.token(0.0)) == Tenant("alice")
        except InvalidApiKeyError:
            return False
        return True


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(world.tokens.run())
        yield world
        task.cancel()


async def test_who_comes_before_the_first_answer_waits_for_it() -> None:
    world = World()
    world.issuer.may_answer.clear()
    async with running(world), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(world.knows(OLD)) for _ in range(3)]
        await asyncio.sleep(0)
        world.issuer.may_answer.set()
    assert all(task.result() for task in waiting)
    assert world.issuer.num_asked == 1


async def test_a_token_of_a_new_key_has_the_issuer_asked_once_for_all() -> None:
    async with running(World()) as world:
        assert await world.knows(OLD)
        world.issuer.answer = key_set(OLD, NEW)
        world.clock.now_s += 5.0
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(world.knows(NEW)) for _ in range(10)]
        assert all(task.result() for task in asked)
        assert world.issuer.num_asked == 2
        assert await world.knows(OLD)


async def test_a_token_of_a_key_that_is_just_published_waits_until_it_may_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_sources, "_LEAST_BETWEEN_S", 0.05)
    async with running(World()) as world:
        assert await world.knows(OLD)
        world.issuer.answer = key_set(OLD, NEW)
        assert await world.knows(NEW)
        assert world.issuer.num_asked == 2


async def test_a_flood_of_unknown_keys_asks_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_sources, "_LEAST_BETWEEN_S", 0.05)
    began_s = time.monotonic()
    async with running(World()) as world:
        assert await world.knows(OLD)
        for _ in range(4):
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(world.knows(NEW)) for _ in range(20)]
            assert not any(task.result() for task in asked)
        assert world.issuer.num_asked == 1 + 4
    assert time.monotonic() - began_s > 4 * 0.04


async def test_few_wait_until_the_issuer_may_be_asked() -> None:
    """Anybody can name a key that nobody knows: they may not take the places of all others."""
    async with running(World()) as world, asyncio.TaskGroup() as tasks:
        assert await world.knows(OLD)
        waiting = [tasks.create_task(world.knows(NEW)) for _ in range(key_sources.MAX_EARLY)]
        await asyncio.sleep(0)
        assert not await world.knows(NEW)
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
    assert world.issuer.num_asked == 1


async def test_nobody_waits_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sources, "_ANSWER_S", 0.01)
    async with running(World()) as world:
        assert await world.knows(OLD)
        for _ in range(key_sources.MAX_EARLY + 1):
            assert not await world.knows(NEW)


async def test_a_key_that_the_issuer_takes_away_is_refused() -> None:
    async with running(World()) as world:
        assert await world.knows(OLD)
        world.issuer.answer = key_set(NEW)
        world.clock.now_s += 5.0
        assert await world.knows(NEW)
        world.clock.now_s += 5.0
        assert not await world.knows(OLD)


async def test_keys_are_asked_for_again_without_a_reason() -> None:
    async with running(World(refresh_s=0.0)) as world:
        assert await world.knows(OLD)
        world.issuer.answer = key_set(NEW)
        before = world.issuer.num_asked
        while world.issuer.num_asked < before + 2:
            await asyncio.sleep(0)
        assert world.keys.known.find("new", "ES256") is not None


async def test_an_issuer_that_lists_no_key_has_taken_all_back() -> None:
    async with running(World(refresh_s=0.0)) as world:
        assert await world.knows(OLD)
        world.issuer.answer = b'{"keys": []}'
        before = world.issuer.num_asked
        while world.issuer.num_asked < before + 2:
            await asyncio.sleep(0)
        assert not await world.knows(OLD)
        world.issuer.answer = key_set(NEW)
        while world.issuer.num_asked < before + 4:
            await asyncio.sleep(0)
        assert await world.knows(NEW)


@pytest.mark.parametrize("broken", [OSError("nobody answers"), b"nonsense", b'{"keys": [{}]}'])
async def test_an_issuer_that_is_down_changes_nothing_for_known_keys(
    broken: bytes | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown one is refused; why is logged once, and nothing of a token is."""
    async with running(World()) as world:
        assert await world.knows(OLD)
        world.issuer.answer = broken
        for _ in range(3):
            world.clock.now_s += 5.0
            assert not await world.knows(NEW)
            assert await world.knows(OLD)
        world.issuer.answer = key_set(OLD, NEW)
        world.clock.now_s += 5.0
        assert await world.knows(NEW)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.message for record in errors] == ["keys of tokens not fetched: those known stay"]
    refusals = [record for record in caplog.records if record.message == "token refused"]
    assert len(refusals) == 3
    assert all("not one of the issuer's" in vars(record)["why"] for record in refusals)
    secret = NEW.token(0.0)
    assert not any(
        piece in str(vars(record)) for record in caplog.records for piece in secret.split(".")
    )


async def test_an_issuer_that_is_well_again_is_asked_as_seldom_as_before(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that it is down once more is told once more."""
    monkeypatch.setattr(key_sources, "_RETRY_S", 0.0)
    async with running(World()) as world:
        assert await world.knows(OLD)
        for _ in range(2):
            world.issuer.answer = OSError("nobody answers")
            world.clock.now_s += 5.0
            assert not await world.knows(NEW)
            world.issuer.answer = key_set(OLD)
            for _ in range(50):
                await asyncio.sleep(0)
            before = world.issuer.num_asked
            for _ in range(50):
                await asyncio.sleep(0)
            assert world.issuer.num_asked == before
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2


async def test_an_issuer_that_was_down_at_the_start_is_asked_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only when a token comes, nor when keys that are known would be asked for again."""
    monkeypatch.setattr(key_sources, "_RETRY_S", 0.0)
    world = World(refresh_s=1000.0)
    world.issuer.answer = OSError("nobody answers")
    async with running(world):
        while world.issuer.num_asked == 0:
            await asyncio.sleep(0)
        assert world.issuer.num_asked == 1
        world.issuer.answer = key_set(OLD)
        for _ in range(50):
            await asyncio.sleep(0)
    assert world.keys.known.find("old", "ES256") is not None


async def test_refusals_are_told_once_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_sources, "_LEAST_BETWEEN_S", 0.0)
    async with running(World()) as world:
        assert await world.knows(OLD)
        for _ in range(5):
            assert not await world.knows(NEW)
        world.clock.now_s += 1.0
        assert not await world.knows(NEW)
    told = [vars(record)["num_untold"] for record in caplog.records if "refused" in record.message]
    assert told == [0, 4]


async def test_keys_in_a_file_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "_LOOK_EVERY_S", 0.0)
    path = tmp_path / "keys"
    path.write_bytes(key_set(OLD))
    os.utime(path, ns=(1, 1))
    keys = FileKeys(path)
    before = keys.known
    path.write_bytes(key_set(NEW))
    os.utime(path, ns=(2, 2))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(keys.run())
        async with asyncio.timeout(60):
            while await keys.newer(before) is before:
                await asyncio.sleep(0.001)
        task.cancel()
    assert (await keys.newer(before)).find("new", "ES256") is not None


def test_a_file_has_to_make_sense_at_the_start(tmp_path: Path) -> None:
    settings = JwtSettings(issuer=ISSUER, audience=[AUDIENCE], jwks=tmp_path / "keys")
    with pytest.raises(ConfigurationError, match=r"--jwt.jwks: .*No such file"):
        callers_of(None, settings)
    (tmp_path / "keys").write_text("nonsense")
    with pytest.raises(ConfigurationError, match=r"--jwt.jwks: .*is not JSON"):
        callers_of(None, settings)
    (tmp_path / "ca").write_text("nonsense")
    with pytest.raises(ConfigurationError, match=r"--jwt.ca: "):
        callers_of(None, JwtSettings(issuer=ISSUER, audience=[AUDIENCE], ca=tmp_path / "ca"))


def answered(status: int, content: bytes) -> httpx.AsyncClient:
    """A client that is answered so."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=httpx.ByteStream(content))

    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    ("issuer", "named", "is_believed"),
    [
        ("https://issuer.example", "https://keys.example/k", True),
        ("https://issuer.example", "http://keys.example/k", False),
        ("https://issuer.example", "file:///k", False),
        ("http://issuer.example", "http://keys.example/k", True),
    ],
)
async def test_keys_are_not_asked_for_over_less_than_their_issuer_is(
    issuer: str, named: str, *, is_believed: bool
) -> None:
    """Anybody on the way could tell other keys, and sign tokens that are taken."""
    told = json.dumps({"issuer": issuer, "jwks_uri": named}).encode()
    discovering = key_sources.Issuer(issuer, None, None)._discover
    async with answered(200, told) as client:
        if is_believed:
            assert await discovering(client) == named
        else:
            with pytest.raises(ValueError, match="no jwks_uri that could be believed"):
                await discovering(client)


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (204, b"", "answered 204"),
        (302, key_set(OLD), "answered 302"),
        (200, b" " * (2**18 + 1), "more than 262144 bytes"),
    ],
    ids=["nothing", "elsewhere", "too long"],
)
async def test_what_is_no_answer_of_an_issuers_is_no_key_set(
    status: int, content: bytes, says: str
) -> None:
    async with answered(status, content) as client:
        with pytest.raises(ValueError, match=says):
            await key_sources._get(client, "https://issuer.example/keys")


async def test_an_answer_may_be_as_long_as_it_may() -> None:
    async with answered(200, b" " * 2**18) as client:
        assert len(await key_sources._get(client, "https://issuer.example/keys")) == 2**18
