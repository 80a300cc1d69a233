"""Whom a client believes."""

from pathlib import Path

import grpc
import pytest
import trustme

from diptych.client.credentials import lock_of, metadata_of
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


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a\x00", "\ud800"])
def test_a_key_that_no_header_can_have_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigurationError, match="API key") as caught:
        metadata_of(key)
    assert key not in caught.value.message
    assert metadata_of("dk-a b") == (("authorization", "Bearer dk-a b"),)
    assert metadata_of("") == ()


def test_a_name_to_expect_goes_with_tls() -> None:
    lock = lock_of(True, "router")
    assert lock is not None
    assert lock[1] == "router"
    with pytest.raises(ConfigurationError, match="no TLS"):
        lock_of(False, "router")


def test_the_systems_authorities_are_those_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would believe those that its wheel brings, and no company's own."""
    believed: list[bytes | None] = []
    monkeypatch.setattr(grpc, "ssl_channel_credentials", believed.append)
    authority = trustme.CA().cert_pem.bytes()
    path = tmp_path / "ca.pem"
    path.write_bytes(authority)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    lock_of(True)
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(path))
    lock_of(True)  # gRPC's own variable is left to it
    assert believed == [authority, None]
