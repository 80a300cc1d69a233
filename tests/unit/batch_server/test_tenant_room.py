"""What is kept of a tenant's batches is bounded, and nobody is locked out by batches of before."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from batch_server.desk.batches import BatchDesk
from batch_server.records import LineError, StoredFile
from batch_server.runner.runner import Runner
from batch_server.store.batches import BatchStore
from batch_server.store.tenant_room import NotAdded, TenantBounds
from diptych.errors import StorageFullError
from tests.unit.batch_server.rig import BATCH, CHAT, INPUT, NOW_S, Rig, a_batch, line, opened

METADATA: Final = {"k": "x" * 500}
BOUNDS: Final = TenantBounds(100, 10**9, max_record_bytes=5000)  # of three such, not of four
WRONG: Final = LineError("invalid_json_line", "line 1: is not JSON", None, 1)


async def added(rig: Rig, batch_id: str, tenant: str = "") -> NotAdded | None:
    return await rig.batches.add(a_batch(batch_id, tenant=tenant, metadata=METADATA), BOUNDS)


async def fail(rig: Rig, batch_id: str, errors: Sequence[LineError] = (WRONG,)) -> None:
    await rig.batches.refuse(batch_id, errors, NOW_S)


async def names(batches: BatchStore, tenant: str = "") -> list[str]:
    """The oldest first."""
    return [batch.batch_id for batch in await batches.page(tenant, None, 100)][::-1]


async def test_batches_that_have_failed_make_way_the_oldest_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        assert await added(rig, "a0", "another") is None
        await fail(rig, "a0")
        for name in ("b1", "b2", "b3"):
            assert await added(rig, name) is None
        await fail(rig, "b2")
        await fail(rig, "b3")
        assert await added(rig, "b4") is None
        assert await names(rig.batches) == ["b1", "b3", "b4"], "b1 has not ended"
        assert await names(rig.batches, "another") == ["a0"]


async def test_what_was_wrong_with_a_file_counts(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        assert await added(rig, "b1") is None
        assert await added(rig, "b2") is None
        await fail(rig, "b2", [LineError("wrong", "x" * 3000)])
        assert await added(rig, "b3") is None
        assert await names(rig.batches) == ["b1", "b3"]


async def test_those_with_results_stay_until_these_are_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        desk = BatchDesk(rig.batches, rig.files, Runner(rig.needs), BOUNDS, lambda: NOW_S)
        asked = {"input_file_id": INPUT, "endpoint": CHAT, "completion_window": "1m"}
        await rig.add_input(line("a", "one"))
        assert await added(rig, BATCH) is None
        ended = await rig.run()
        for name in ("c2", "c3"):
            assert await added(rig, name) is None
        assert await added(rig, "c4") is NotAdded.RECORDS
        with pytest.raises(StorageFullError, match="more than 5000 bytes: delete results"):
            await desk.create("", {**asked, "metadata": METADATA})
        assert await names(rig.batches) == [BATCH, "c2", "c3"]
        assert await rig.files.delete("", ended.output_file_id or "")
        assert await added(rig, "c4") is None
        assert await names(rig.batches) == ["c2", "c3", "c4"]


async def test_small_files_are_no_way_to_have_any_number_of_them(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        for number in range(4):
            file = StoredFile(
                file_id=f"file-{number}",
                tenant="",
                purpose="batch",
                filename="in.jsonl",
                created_s=1,
                num_bytes=1,
            )
            assert await rig.files.begin(file, 3000) is (number < 3)
