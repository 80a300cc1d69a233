"""Suites that others wrote for APIs like OpenAI's, against a local cluster."""

import asyncio
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.cluster import running_cluster
from tests.integration.clients import suite
from tests.notes import Note
from tests.terse_model import write_terse_model

NUM_EACH = 20  # bodies of each operation; `make clients` has more

pytestmark = pytest.mark.skipif(
    find_spec("llm_comply") is None or find_spec("schemathesis") is None,
    reason="llm-comply or schemathesis is missing: make setup installs them",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[suite.Server]:
    work = tmp_path_factory.mktemp("suites")
    folder = write_terse_model(work / "terse")
    with running_cluster(
        work / "cluster",
        str(folder),
        worker_flags={"num-blocks": "256"},
        router_flags={"local-prefill-below-tokens": "0", "answer-form": "hermes"},
    ) as cluster:
        asyncio.run(cluster.wait_ready())
        yield suite.Server(cluster, folder.name, folder, work)
        asyncio.run(cluster.wait_baseline(within_s=60))


def test_answers_comply_with_openais_and_open_responses_schemas(
    server: suite.Server, note: Note
) -> None:
    note(f"llm-comply: {suite.llm_comply(server, sys.executable)}")


def test_bodies_of_openais_description_are_answered_as_it_says(
    server: suite.Server, note: Note
) -> None:
    note(f"schemathesis: {suite.schemathesis(server, sys.executable, NUM_EACH)}")
