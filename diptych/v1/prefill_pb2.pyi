from diptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillCommand(_message.Message):
    __slots__ = ("start", "grant", "heartbeat")
    START_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    grant: Grant
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("router_incarnation", "sequence_id", "request_id", "spec", "report")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: str
    sequence_id: int
    request_id: str
    spec: _common_pb2.SequenceSpec
    report: PromptReport
    def __init__(self, router_incarnation: _Optional[str] = ..., sequence_id: _Optional[int] = ..., request_id: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.SequenceSpec, _Mapping]] = ..., report: _Optional[_Union[PromptReport, _Mapping]] = ...) -> None: ...

class PromptReport(_message.Message):
    __slots__ = ("logprobs", "pooling")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    logprobs: LogprobsReport
    pooling: PoolingReport
    def __init__(self, logprobs: _Optional[_Union[LogprobsReport, _Mapping]] = ..., pooling: _Optional[_Union[PoolingReport, _Mapping]] = ...) -> None: ...

class LogprobsReport(_message.Message):
    __slots__ = ("first_position", "end_position", "num_top")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    END_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    end_position: int
    num_top: int
    def __init__(self, first_position: _Optional[int] = ..., end_position: _Optional[int] = ..., num_top: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("grant_id", "ticket", "reader_incarnation")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    ticket: bytes
    reader_incarnation: str
    def __init__(self, grant_id: _Optional[int] = ..., ticket: _Optional[bytes] = ..., reader_incarnation: _Optional[str] = ...) -> None: ...

class PoolingReport(_message.Message):
    __slots__ = ("pooling",)
    POOLING_FIELD_NUMBER: _ClassVar[int]
    pooling: _common_pb2.Pooling
    def __init__(self, pooling: _Optional[_Union[_common_pb2.Pooling, str]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("accepted", "first_token", "granted", "heartbeat", "ended", "prompt_logprobs", "pooled")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    first_token: FirstToken
    granted: Granted
    heartbeat: _common_pb2.Heartbeat
    ended: _common_pb2.Failure
    prompt_logprobs: _common_pb2.PromptLogprobs
    pooled: PooledStates
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., ended: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., pooled: _Optional[_Union[PooledStates, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("incarnation", "num_cached_tokens")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    num_cached_tokens: int
    def __init__(self, incarnation: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "position", "margin", "finish_reason", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    position: int
    margin: float
    finish_reason: _common_pb2.FinishReason
    logprobs: _common_pb2.TokenLogprobs
    def __init__(self, token_id: _Optional[int] = ..., position: _Optional[int] = ..., margin: _Optional[float] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class PooledStates(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("grant_id",)
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    def __init__(self, grant_id: _Optional[int] = ...) -> None: ...
