"""Models, ways to call a module's cluster, and the two ends of a transfer, that tests share."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
import pytest_asyncio

from diptych.client import DiptychClient
from diptych.rpc.channel import open_channel
from tests.cluster import Cluster
from tests.integration.transfer_rig import Reader, Source, config, open_reader, open_source
from tests.tiny_model import write_tiny_model
from tests.transports import TRANSPORTS

if TYPE_CHECKING:
    import openai

BLOCK_SIZE = 16
TINY_MAX_LEN = 256


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_model(folder, family="llama")
    return folder


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-gemma")
    write_tiny_model(folder, family="gemma3")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[DiptychClient]:
    """Of the module's own ``cluster``, which is ready; and so are those below."""
    await cluster.wait_ready()
    async with cluster.client() as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    await cluster.wait_ready()
    async with open_channel(cluster.router.address) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    await cluster.wait_ready()
    url = f"http://{cluster.router.http_address}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def openai_client(http: httpx.AsyncClient) -> "AsyncIterator[openai.AsyncOpenAI]":
    import openai  # takes a second, and few modules call by it

    url = f"{http.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def source(transport: str) -> AsyncIterator[Source]:
    async with open_source(config(transport)) as opened:
        yield opened


@pytest.fixture
async def reader(transport: str) -> AsyncIterator[Reader]:
    async with open_reader(config(transport)) as opened:
        yield opened


@pytest.fixture(scope="session")
def wide_model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer with a context that no test fills."""
    folder = tmp_path_factory.mktemp("wide") / "tiny"
    shutil.copytree(tiny_llama, folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["max_position_embeddings"] = 1_000_000
    path.write_text(json.dumps(settings))
    return folder
