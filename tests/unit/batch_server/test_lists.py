"""Lists of files and batches, page by page."""

from pathlib import Path
from typing import Any

from batch_server.records import new_id
from tests.unit.batch_server.http_rig import BODY, asked, error_of, upload
from tests.unit.batch_server.rig import opened


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client:
        ids = [await upload(client, b"%d" % number) for number in range(5)]
        first = (await client.get("/v1/files?limit=2")).json()
        assert [each["id"] for each in first["data"]] == [ids[4], ids[3]]
        assert (first["has_more"], first["last_id"]) == (True, ids[3])
        rest = (await client.get(f"/v1/files?limit=3&after={ids[3]}")).json()
        assert [each["id"] for each in rest["data"]] == [ids[2], ids[1], ids[0]]
        assert not rest["has_more"]
        oldest = (await client.get("/v1/files?limit=1&order=asc")).json()
        assert oldest["first_id"] == ids[0]
        newer = (await client.get(f"/v1/files?limit=2&order=asc&after={ids[0]}")).json()
        assert [each["id"] for each in newer["data"]] == [ids[1], ids[2]]
        assert (await client.get("/v1/files?purpose=batch_output")).json()["data"] == []
        for query, param in [("limit=0", "limit"), ("limit=x", "limit"), ("order=x", "order")]:
            answer = await client.get(f"/v1/files?{query}")
            assert error_of(answer) == (400, "request_invalid", param)
        for limit in ("101", "000000001" + "1" * 5000, "²", "٣"):
            answer = await client.get(f"/v1/batches?limit={limit}")
            assert error_of(answer) == (400, "request_invalid", "limit")


async def test_a_page_behind_what_is_no_id_is_refused(tmp_path: Path) -> None:
    """Else it were the first one again, or an empty last one."""
    async with opened(tmp_path) as rig, asked(rig) as client:
        file_id = await upload(client)
        made = await client.post("/v1/batches", json={**BODY, "input_file_id": file_id})
        batch_id = made.json()["id"]
        for path, wrong in [
            ("/v1/files", ["file-zzz", "", "abc", f"{file_id}0", file_id.upper(), batch_id]),
            ("/v1/batches", ["batch_zzz", "", "abc", f"{batch_id}0", f"x{batch_id}", file_id]),
        ]:
            assert len((await client.get(path)).json()["data"]) == 1
            for after in wrong:
                answer = await client.get(path, params={"after": after})
                assert error_of(answer) == (400, "request_invalid", "after"), after


async def test_who_deletes_each_file_that_is_listed_gets_to_the_last(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client:
        ids = [await upload(client, b"%d" % number) for number in range(5)]
        deleted = list[str]()
        page: dict[str, Any] = {"has_more": True, "last_id": new_id("file", 9e9)}
        while page["has_more"]:
            query = {"limit": 2, "after": page["last_id"]}
            page = (await client.get("/v1/files", params=query)).json()
            for each in page["data"]:
                await client.delete(f"/v1/files/{each['id']}")
                deleted.append(each["id"])
    assert deleted == ids[::-1]
