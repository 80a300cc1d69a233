"""The tables of the batch server."""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

from batch_server.status import BatchStatus

METADATA: Final = MetaData()

FILES: Final = Table(
    "files",
    METADATA,
    Column("file_id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("is_whole", Boolean, nullable=False),  # its upload has ended well
    Column("batch_id", Text),
    Column("is_errors", Boolean, nullable=False),
    Index("files_of_tenant", "tenant", "file_id"),
)

CHUNKS: Final = Table(
    "chunks",
    METADATA,
    Column("file_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

BATCHES: Final = Table(
    "batches",
    METADATA,
    Column("batch_id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False),
    *(
        Column(f"{status}_s", BigInteger)
        for status in BatchStatus
        if status is not BatchStatus.VALIDATING
    ),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("metadata", Text),  # JSON
    Column("errors", Text),  # JSON
    Column("num_lines", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("num_unsent", Integer, nullable=False),
    Index("batches_of_tenant", "tenant", "batch_id"),
    Index("batches_by_status", "status"),
)

LINES: Final = Table(
    "lines",
    METADATA,
    Column("batch_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, nullable=False),
    Column("custom_id", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("lines_by_rank", "batch_id", "rank"),
)

RESULTS: Final = Table(
    "results",
    METADATA,
    Column("batch_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("is_error", Boolean, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("line", LargeBinary, nullable=False),
)
