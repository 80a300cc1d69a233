"""One database, one process."""

import stat
from pathlib import Path

import pytest

from batch_server.store.batches import BatchStore
from batch_server.store.database import Database
from diptych.errors import ConfigurationError


async def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'batch.sqlite'}"
    async with Database(url):
        with pytest.raises(ConfigurationError, match="is used by another process"):
            async with Database(url):
                pass
    async with Database(url) as database:
        assert await BatchStore(database).open_ids() == []


async def test_nobody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "batch.sqlite"
    async with Database(f"sqlite:///{path}"):
        for each in (path, tmp_path / "batch.sqlite-wal"):
            assert stat.S_IMODE(each.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nothing", "is no URL"),
        ("sqlite://", "expected a file"),
        ("sqlite:////no/such/folder/batch.sqlite", "No such file"),
        ("mysql://secret@here/there", "sqlite or postgresql"),
    ],
)
async def test_a_wrong_setting_is_one_line(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as caught:
        async with Database(url):
            pass
    assert caught.value.message.startswith("--database: ")
    assert "secret" not in caught.value.message
    assert "\n" not in caught.value.message
