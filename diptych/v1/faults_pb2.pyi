from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SetRulesRequest(_message.Message):
    __slots__ = ("rules",)
    RULES_FIELD_NUMBER: _ClassVar[int]
    rules: str
    def __init__(self, rules: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FaultsReport(_message.Message):
    __slots__ = ("num_fired", "num_reads_unfinished", "num_foreign_writes", "num_canaries", "num_canaries_checked", "num_canaries_changed")
    NUM_FIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_READS_UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_FOREIGN_WRITES_FIELD_NUMBER: _ClassVar[int]
    NUM_CANARIES_FIELD_NUMBER: _ClassVar[int]
    NUM_CANARIES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    NUM_CANARIES_CHANGED_FIELD_NUMBER: _ClassVar[int]
    num_fired: _containers.RepeatedScalarFieldContainer[int]
    num_reads_unfinished: int
    num_foreign_writes: int
    num_canaries: int
    num_canaries_checked: int
    num_canaries_changed: int
    def __init__(self, num_fired: _Optional[_Iterable[int]] = ..., num_reads_unfinished: _Optional[int] = ..., num_foreign_writes: _Optional[int] = ..., num_canaries: _Optional[int] = ..., num_canaries_checked: _Optional[int] = ..., num_canaries_changed: _Optional[int] = ...) -> None: ...
