"""Clients with tokens that an issuer signed, over gRPC and HTTP; how its keys are asked for."""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import pytest_asyncio
import trustme

from diptych.api_keys import digest
from diptych.client import DiptychClient, SamplingOptions
from diptych.errors import InvalidApiKeyError, QuotaExceededError
from router.frontend.callers.key_sources import Issuer
from router.frontend.callers.signing_keys import read_signing_keys
from tests import metrics
from tests.integration.router_rig import PROMPT, Cluster, expected, running
from tests.issuer import AUDIENCE, ISSUER, KEYS_PATH, Published, Signer, key_set, published

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = SamplingOptions(max_tokens=4, ignore_eos=True)
OLD, NEW = Signer("old"), Signer("new", "RS256")


class Served(NamedTuple):
    cluster: Cluster
    http_address: str
    metrics_address: str
    issuer: Published

    async def tokens(
        self, credential: str, options: SamplingOptions = OPTIONS, retries: int = 5
    ) -> list[int]:
        address = self.cluster.address
        async with DiptychClient(address, api_key=credential, retries=retries) as client:
            chunks = client.generate(token_ids=PROMPT, options=options)
            return [token_id async for chunk in chunks for token_id in chunk.token_ids]

    async def status(self, credential: str) -> int:
        """Of a request over HTTP."""
        return (await self.posted(credential)).status_code

    async def posted(self, credential: str, num_prompts: int = 1) -> httpx.Response:
        """What a request over HTTP gets."""
        prompt = [list(PROMPT)] * num_prompts
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://{self.http_address}/v1/completions"
            headers = {"authorization": f"Bearer {credential}"}
            return await client.post(url, json=body, headers=headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    work = tmp_path_factory.mktemp("tokens")
    keys, ports = work / "keys", work / "ports"
    keys.write_text(f"alice {digest('one')}\ncarol {digest('few')} requests_per_minute=2\n")
    async with (
        published(OLD) as issuer,
        running(
            wide_model,
            1,
            1,
            client={"api_key": "one"},
            api_keys=keys,
            jwt={
                "issuer": ISSUER,
                "audience": [AUDIENCE],
                "jwks_url": issuer.url + KEYS_PATH,
                "limits_claim": "limits",
            },
            http=True,
            http_port=0,
            metrics_port=0,
            max_tenant_series=2,
            port_file=ports,
            served_model_name="m",
        ) as cluster,
    ):
        told = json.loads(ports.read_text())
        yield Served(cluster, told["http_address"], told["metrics_address"], issuer)


async def test_a_token_is_as_good_as_a_key_over_both(served: Served) -> None:
    for credential in ("one", OLD.token()):
        assert await served.tokens(credential) == expected(4)
        assert await served.status(credential) == 200


async def test_the_claim_is_the_tenant(served: Served) -> None:
    """A key's tenant of the same name is the same one, whose cached KV it shares."""
    specs = served.cluster.prefill[0].specs
    before = len(specs)
    for credential in ("one", OLD.token(), OLD.token(claims={"sub": "bob"})):
        await served.tokens(credential)
    key, token, other = [spec.cache_salt for spec in specs[before:]]
    assert key == token != other


@pytest.mark.parametrize(
    "claims", [{"aud": "others"}, {"iss": "https://others.example"}, {"exp": 1}, {"sub": None}]
)
async def test_a_token_that_is_not_right_opens_nothing(
    served: Served, claims: dict[str, object]
) -> None:
    token = OLD.token(claims=claims)
    assert await served.status(token) == 401
    with pytest.raises(InvalidApiKeyError) as caught:
        await served.tokens(token)
    assert token not in caught.value.message


def num_asked(served: Served) -> int:
    return len(served.cluster.prefill[0].specs) + len(served.cluster.decode[0].specs)


async def test_what_is_beyond_a_quota_is_refused_over_both_and_asks_no_worker(
    served: Served,
) -> None:
    await served.tokens("few")
    assert await served.status("few") == 200
    before = num_asked(served)
    async with DiptychClient(served.cluster.address, api_key="few", retries=0) as client:
        with pytest.raises(QuotaExceededError) as caught:
            async for _ in client.generate(token_ids=PROMPT, options=OPTIONS):
                pass
    assert caught.value.metadata["quota"] == "requests_per_minute"
    assert 0 < (caught.value.retry_after_s or 0) <= 60
    answer = await served.posted("few")
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.json()["error"]["code"] == "quota_exceeded"
    assert "requests_per_minute" in answer.json()["error"]["message"]
    assert num_asked(served) == before
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"authorization": "Bearer one"}
        told = await http.get(f"http://{served.http_address}/metrics", headers=headers)
    assert 'router_quota_refusals_total{quota="requests_per_minute"} 2.0' in told.text
    assert await served.status("one") == 200


async def test_tenants_are_told_of_to_the_operator_and_to_no_client(served: Served) -> None:
    """Two of them by name, as was set: who came first."""

    async def told() -> dict[str, float]:
        return await asyncio.to_thread(metrics.scrape, served.metrics_address)

    def series(name: str, tenant: str, more: str = "") -> str:
        return f'diptych_tenant_{name}_total{{{more}tenant="{tenant}"}}'

    for first in ("one", OLD.token(claims={"sub": "bob"})):
        assert await served.status(first) == 200
    before = await told()
    assert await served.status("one") == 200
    assert await served.tokens(OLD.token(claims={"sub": "late"})) == expected(4)
    after = await told()

    def grown(*args: str) -> float:
        return after[series(*args)] - before.get(series(*args), 0.0)

    assert grown("requests", "alice", 'ending="ok",') == 1
    assert grown("input_tokens", "alice") == grown("input_tokens", "other") == len(PROMPT)
    assert grown("output_tokens", "alice") == grown("output_tokens", "other") == 4
    assert grown("queue_seconds", "alice") > 0
    assert series("cached_tokens", "alice") in after
    tenants = {key.split('tenant="')[1] for key in after if key.startswith("diptych_tenant_")}
    assert len(tenants) == 3, tenants
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"authorization": "Bearer one"}
        public = await http.get(f"http://{served.http_address}/metrics", headers=headers)
    assert "diptych_requests_total{" in public.text
    assert "tenant" not in public.text.replace("their tenant's quota", "")


async def test_tokens_that_an_answer_did_not_come_to_are_given_back(served: Served) -> None:
    """50 a minute: 20 and 30 reserved, 21 used; what is left is enough for 25 at once."""
    token = OLD.token(claims={"sub": "dora", "limits": {"tokens_per_minute": 50}})
    first = SamplingOptions(max_tokens=30, ignore_eos=True, stop_token_ids=tuple(expected(1)))
    assert len(await served.tokens(token, first)) == 1
    assert await served.tokens(token, SamplingOptions(max_tokens=5, ignore_eos=True)) == expected(5)
    before = num_asked(served)
    with pytest.raises(QuotaExceededError, match="tokens_per_minute"):
        await served.tokens(token, first, retries=0)
    assert num_asked(served) == before


async def test_an_issuer_that_is_down_keeps_nobody_known_out(served: Served) -> None:
    keys = served.issuer.pages.pop(KEYS_PATH)
    try:
        assert await served.status(NEW.token()) == 401
        assert await served.status(OLD.token()) == 200
    finally:
        served.issuer.pages[KEYS_PATH] = keys


async def test_an_issuer_may_say_itself_where_its_keys_are() -> None:
    async with published(OLD) as issuer:
        told = {"issuer": issuer.url, "jwks_uri": issuer.url + KEYS_PATH}
        issuer.pages["/.well-known/openid-configuration"] = json.dumps(told).encode()
        keys = read_signing_keys(await Issuer(issuer.url, None, None)())
        assert keys.find("old", "ES256") is not None
        assert issuer.num_asked == 2


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (b"nonsense", "is not JSON"),
        (b"[]", "another issuer"),
        (b'{"issuer": "https://others.example"}', "another issuer"),
        (b'{"issuer": "URL"}', "no jwks_uri"),
        (b'{"issuer": "URL", "jwks_uri": "file:///etc/passwd"}', "no jwks_uri"),
    ],
)
async def test_what_an_issuer_says_of_itself_has_to_make_sense(told: bytes, says: str) -> None:
    async with published(OLD) as issuer:
        page = told.replace(b"URL", issuer.url.encode())
        issuer.pages["/.well-known/openid-configuration"] = page
        with pytest.raises(ValueError, match=says):
            await Issuer(issuer.url, None, None)()


async def test_an_answer_that_is_none_or_elsewhere_is_not_followed() -> None:
    async with published(OLD) as issuer:
        ask = Issuer(ISSUER, issuer.url + KEYS_PATH, None)
        assert await ask() == key_set(OLD)
        issuer.pages["/other"] = key_set(NEW)
        issuer.status, issuer.headers = "302 Found", "location: /other\r\n"
        with pytest.raises(ValueError, match="answered 302"):
            await ask()
        issuer.status = "503 Service Unavailable"
        with pytest.raises(ValueError, match="answered 503"):
            await ask()
        assert issuer.num_asked == 3


async def test_an_answer_without_an_end_is_left() -> None:
    async with published(OLD) as issuer:
        issuer.is_endless = True
        with pytest.raises(ValueError, match="more than 262144 bytes"):
            await Issuer(ISSUER, issuer.url + KEYS_PATH, None)()


async def test_another_authority_counts_from_the_next_question_on(tmp_path: Path) -> None:
    before, after, path = trustme.CA(), trustme.CA(), tmp_path / "ca.pem"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + key_set(OLD))
        writer.close()

    before.issue_cert("127.0.0.1").configure_cert(context)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        path.write_bytes(before.cert_pem.bytes())
        port = server.sockets[0].getsockname()[1]
        ask = Issuer(ISSUER, f"https://127.0.0.1:{port}{KEYS_PATH}", path)
        assert await ask() == key_set(OLD)
        after.issue_cert("127.0.0.1").configure_cert(context)
        with pytest.raises(httpx.ConnectError):
            await ask()
        path.write_bytes(after.cert_pem.bytes())
        os.utime(path, (1, 1))  # it is not being written any more
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(ask.run())
            async with asyncio.timeout(60):
                while (told := await told_by(ask)) is None:
                    await asyncio.sleep(0.1)
            following.cancel()
        assert told == key_set(OLD)


async def told_by(ask: Issuer) -> bytes | None:
    with suppress(httpx.ConnectError):
        return await ask()
    return None


async def test_without_an_issuer_there_is_no_answer() -> None:
    async with published(OLD) as issuer:
        ask = Issuer(ISSUER, issuer.url + KEYS_PATH, None)
    with pytest.raises(httpx.ConnectError):
        await ask()


@pytest.mark.parametrize(
    ("quota", "limit"),
    [("requests_per_minute", 3), ("tokens_per_minute", 3 * (len(PROMPT) + 4))],
)
async def test_several_prompts_are_all_within_a_quota_or_ask_no_worker(
    served: Served, quota: str, limit: int
) -> None:
    """One more is left, and stays so for who wants no more."""
    token = OLD.token(claims={"sub": quota, "limits": {quota: limit}})
    answer = await served.posted(token, 2)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    before = num_asked(served)
    answer = await served.posted(token, 2)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "quota_exceeded"
    assert quota in answer.json()["error"]["message"]
    assert num_asked(served) == before
    assert await served.status(token) == 200
