from diptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("reader_incarnation", "layout", "transports", "pool")
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    reader_incarnation: str
    layout: _common_pb2.KVLayout
    transports: _containers.RepeatedScalarFieldContainer[str]
    pool: PoolPlace
    def __init__(self, reader_incarnation: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., pool: _Optional[_Union[PoolPlace, _Mapping]] = ...) -> None: ...

class PoolPlace(_message.Message):
    __slots__ = ("memory_kind", "device_id", "machine", "ucx_tls")
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    UCX_TLS_FIELD_NUMBER: _ClassVar[int]
    memory_kind: str
    device_id: int
    machine: str
    ucx_tls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, memory_kind: _Optional[str] = ..., device_id: _Optional[int] = ..., machine: _Optional[str] = ..., ucx_tls: _Optional[_Iterable[str]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("source_incarnation", "layout", "transport", "memory", "pool")
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    source_incarnation: str
    layout: _common_pb2.KVLayout
    transport: str
    memory: MemoryDescriptor
    pool: PoolPlace
    def __init__(self, source_incarnation: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., transport: _Optional[str] = ..., memory: _Optional[_Union[MemoryDescriptor, _Mapping]] = ..., pool: _Optional[_Union[PoolPlace, _Mapping]] = ...) -> None: ...

class MemoryDescriptor(_message.Message):
    __slots__ = ("agent_metadata", "digest", "base_address", "block_bytes", "num_blocks", "memory_kind", "device_id", "ranks")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    digest: bytes
    base_address: int
    block_bytes: int
    num_blocks: int
    memory_kind: str
    device_id: int
    ranks: _containers.RepeatedCompositeFieldContainer[MemoryDescriptor]
    def __init__(self, agent_metadata: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., base_address: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., memory_kind: _Optional[str] = ..., device_id: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[MemoryDescriptor, _Mapping]]] = ...) -> None: ...

class FetchCommand(_message.Message):
    __slots__ = ("open", "confirm", "heartbeat", "taken")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    open: FetchOpen
    confirm: Confirm
    heartbeat: _common_pb2.Heartbeat
    taken: Taken
    def __init__(self, open: _Optional[_Union[FetchOpen, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ...) -> None: ...

class FetchOpen(_message.Message):
    __slots__ = ("reader_incarnation", "source_incarnation", "ticket", "num_probe_blocks", "first_token", "transport")
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    reader_incarnation: str
    source_incarnation: str
    ticket: bytes
    num_probe_blocks: int
    first_token: int
    transport: str
    def __init__(self, reader_incarnation: _Optional[str] = ..., source_incarnation: _Optional[str] = ..., ticket: _Optional[bytes] = ..., num_probe_blocks: _Optional[int] = ..., first_token: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("num_tokens", "digest")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    digest: bytes
    def __init__(self, num_tokens: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class FetchEvent(_message.Message):
    __slots__ = ("number", "opened", "range", "data", "confirmed", "heartbeat", "ended", "staged")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    number: int
    opened: FetchOpened
    range: Range
    data: Data
    confirmed: Confirmed
    heartbeat: _common_pb2.Heartbeat
    ended: _common_pb2.Failure
    staged: Staged
    def __init__(self, number: _Optional[int] = ..., opened: _Optional[_Union[FetchOpened, _Mapping]] = ..., range: _Optional[_Union[Range, _Mapping]] = ..., data: _Optional[_Union[Data, _Mapping]] = ..., confirmed: _Optional[_Union[Confirmed, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., ended: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., staged: _Optional[_Union[Staged, _Mapping]] = ...) -> None: ...

class FetchOpened(_message.Message):
    __slots__ = ("end_token", "prompt_digest")
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    end_token: int
    prompt_digest: bytes
    def __init__(self, end_token: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("first_token", "num_tokens", "block_ids", "generations", "digests", "last", "sample_seed")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_SEED_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    num_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    last: bool
    sample_seed: int
    def __init__(self, first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[bytes]] = ..., last: _Optional[bool] = ..., sample_seed: _Optional[int] = ...) -> None: ...

class Data(_message.Message):
    __slots__ = ("offset", "payload")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    offset: int
    payload: bytes
    def __init__(self, offset: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Staged(_message.Message):
    __slots__ = ("offset", "slots")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offset: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ...) -> None: ...

class Confirmed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
