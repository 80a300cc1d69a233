"""Whom a client believes."""

from pathlib import Path

import pytest

from diptych.client.credentials import lock_of
from diptych.errors import ConfigurationError


@pytest.mark.parametrize("content", [b"", b"no certificate", b"\xff\x00"])
def test_a_file_without_certificates_is_named(tmp_path: Path, content: bytes) -> None:
    """Else every call would fail, and say nothing of it."""
    path = tmp_path / "ca.pem"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"ca\.pem: no certificate"):
        lock_of(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ca\.pem: No such file"):
        lock_of(tmp_path / "ca.pem")


def test_a_name_to_expect_goes_with_tls() -> None:
    lock = lock_of(True, "router")
    assert lock is not None
    assert lock[1] == "router"
    with pytest.raises(ConfigurationError, match="no TLS"):
        lock_of(False, "router")
