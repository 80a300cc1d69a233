from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class WatchCacheRequest(_message.Message):
    __slots__ = ("router_incarnation", "incarnation", "seq")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: str
    incarnation: str
    seq: int
    def __init__(self, router_incarnation: _Optional[str] = ..., incarnation: _Optional[str] = ..., seq: _Optional[int] = ...) -> None: ...

class CacheChange(_message.Message):
    __slots__ = ("incarnation", "reset", "from_seq", "to_seq", "removed", "added", "num_blocks", "digest", "has_more")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    TO_SEQ_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    reset: bool
    from_seq: int
    to_seq: int
    removed: bytes
    added: bytes
    num_blocks: int
    digest: int
    has_more: bool
    def __init__(self, incarnation: _Optional[str] = ..., reset: _Optional[bool] = ..., from_seq: _Optional[int] = ..., to_seq: _Optional[int] = ..., removed: _Optional[bytes] = ..., added: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., digest: _Optional[int] = ..., has_more: _Optional[bool] = ...) -> None: ...
