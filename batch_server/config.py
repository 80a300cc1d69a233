"""Settings of the batch server. Built once at start, see :mod:`diptych.settings`."""

from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

import httpx
from pydantic import AfterValidator, Field

from diptych.address import LAST_PORT, is_host
from diptych.process import ProcessConfig
from router.client_settings import JwtSettings, PublicTls

_MOST_BYTES = 2**30


def _check_router(value: str) -> str:
    parts = urlsplit(value)
    if "@" in value:  # a secret, which no error repeats
        raise ValueError("expected no user and password (got some of them)")
    is_bare = not (parts.path.rstrip("/") or parts.query or parts.fragment)
    is_named = bool(parts.hostname) and is_host(parts.hostname or "")
    if parts.scheme not in ("http", "https") or not is_named or not is_bare or not _is_url(value):
        raise ValueError("expected http://host:port or https://host:port")
    return value.rstrip("/")


def _is_url(text: str) -> bool:
    """Whether the client of routers takes it, whose error would end us at a batch's first line."""
    try:
        port = httpx.URL(text).port
    except httpx.InvalidURL:
        return False
    return port is None or 0 < port <= LAST_PORT


RouterUrl = Annotated[str, AfterValidator(_check_router)]


class BatchServerConfig(ProcessConfig):
    """Takes files of requests by gRPC and HTTP, has routers answer them, and keeps the results.

    Of one database there may be one such process; another takes over what it left.
    """

    role: ClassVar[str] = "batch-server"

    listen: str = Field(
        "127.0.0.1:50052", description="host:port to serve gRPC on; port 0 picks one."
    )

    router: list[RouterUrl] = Field(
        ["http://127.0.0.1:8000"],
        min_length=1,
        description="HTTP address of a router; the next is asked where one does not answer.",
    )
    router_key_file: Path | None = Field(
        None,
        description="File with the key that the routers ask for, and nothing else. It is this "
        "server's own: of its clients' keys none is kept or passed on.",
    )
    router_ca: Path | None = Field(
        None,
        description="PEM file of whom to believe that it is a router, with https. Unset: the "
        "system's.",
    )
    database: str = Field(
        "sqlite:///diptych-batch.sqlite",
        min_length=1,
        description="Where all is kept: sqlite:///FILE, or postgresql+psycopg://….",
    )
    http_port: int = Field(
        8001, ge=0, le=LAST_PORT, description="Port of the HTTP API; 0 picks one."
    )
    public_tls: PublicTls = PublicTls()
    api_keys: Path | None = Field(
        None,
        description="File of the keys that clients have to send, the same as the routers' own. "
        "Each tenant sees its own files and batches. Without this and jwt.issuer anybody may call.",
    )
    jwt: JwtSettings = JwtSettings()
    max_concurrent: int = Field(
        16, ge=1, le=4096, description="Lines that are with the routers at a time."
    )
    max_attempts: int = Field(
        5,
        ge=1,
        le=1000,
        description="Tries of a line that fails, ends workers, or whose connection breaks. That "
        "a router is full or away does not count.",
    )
    line_timeout_s: float = Field(
        1800.0, gt=0, description="A router that has not answered a line within this failed, s."
    )
    max_answer_bytes: int = Field(
        64 * 2**20, ge=1, le=_MOST_BYTES, description="Size of a router's answer to one line."
    )
    max_file_bytes: int = Field(
        200 * 2**20, ge=1, le=_MOST_BYTES, description="Size of one file of requests."
    )
    max_lines: int = Field(50_000, ge=1, le=10**6, description="Lines of one file.")
    max_line_bytes: int = Field(
        4 * 2**20,
        ge=1,
        le=2**26,
        description="Size of one line; no more than the routers' max_request_bytes helps.",
    )
    max_tenant_bytes: int = Field(
        4 * 2**30,
        ge=1,
        description="Of all files that a tenant has, results too, and 1 KiB for each: one with "
        "more uploads none. A new batch needs room for its requests, and those of other open "
        "ones, once more.",
    )
    max_open_batches: int = Field(
        32, ge=1, le=10_000, description="Batches of a tenant that have not ended."
    )
    upload_s: float = Field(600.0, gt=0, description="A file is uploaded within this, s.")
