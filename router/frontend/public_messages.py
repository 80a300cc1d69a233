"""The public messages (inference.proto) as plain data, and back. Pure.

Reading checks the number of everything before going through it, and copies no token
ids: the plain request views those of the message.
"""

from collections.abc import Mapping

from google.protobuf import struct_pb2

from diptych.errors import InvalidRequestError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import options_from_proto
from diptych.service_level import ServiceLevel
from diptych.text.chat_template import Message, Tool, ToolCall
from diptych.token_logprobs import PromptLogprobs
from diptych.v1 import common_pb2, inference_pb2
from router.frontend.tools import check_arguments, check_num_tools, read_arguments
from router.frontend.validation import MAX_PARTS, MAX_TEMPLATE_ARGUMENT_BYTES, check_num_messages
from router.generation.answer import (
    ChoiceFinished,
    Delta,
    GenerationEvent,
    Started,
    Summary,
    Timing,
    Usage,
)
from router.generation.request import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
)


def read_request(message: inference_pb2.GenerateRequest, num_bytes: int) -> GenerationRequest:
    """What a client asks for; ``num_bytes`` is its size on the wire.

    Raises:
        InvalidRequestError: something is too long, malformed, or not served yet.
    """
    if message.adapter:
        raise InvalidRequestError("is not supported yet", field="adapter")
    return GenerationRequest(
        prompt=read_prompt(message),
        sampling=options_from_proto(message.sampling, "sampling"),
        model=message.model,
        request_id=message.request_id,
        cache_salt=message.cache_salt,
        level=ServiceLevel.of(message),
        emitted_token_ids=message.emitted_token_ids,
        model_digest=message.model_digest,
        return_prompt_token_ids=message.return_prompt_token_ids,
        num_bytes=num_bytes,
    )


def read_prompt(
    message: inference_pb2.GenerateRequest
    | inference_pb2.TokenizeRequest
    | inference_pb2.ScoreRequest,
) -> Prompt:
    """Its ``prompt``. Raises InvalidRequestError."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(message.text)
    if kind == "chat":
        return _read_chat(message.chat)
    if not isinstance(message, inference_pb2.TokenizeRequest) and kind == "tokens":
        return TokenPrompt(message.tokens.ids)
    members = [field.name for field in message.DESCRIPTOR.oneofs_by_name["prompt"].fields]
    raise InvalidRequestError(f"give one of {', '.join(members)}", field="prompt")


def write_event(event: GenerationEvent) -> inference_pb2.GenerateResponse:
    """One message of the stream."""
    response = inference_pb2.GenerateResponse()
    match event:
        case Delta():  # by far the most
            delta = response.delta
            delta.SetInParent()
            delta.text = event.text
            delta.token_ids.extend(event.token_ids)
            delta.position = event.position
            if event.choice:
                delta.choice = event.choice
            if event.margins:
                delta.margins.extend(event.margins)
            if event.logprobs:
                delta.logprobs.extend([found.to_proto() for found in event.logprobs])
            if event.reasoning:
                delta.reasoning = event.reasoning
            for call in event.tool_calls:
                delta.tool_calls.add(id=call.call_id, name=call.name, arguments=call.arguments)
        case Started():
            response.started.request_id = event.request_id
            response.started.model = event.model
            response.started.seed = event.seed
            response.started.prompt_token_ids.extend(event.prompt_token_ids)
            response.started.model_digest = event.model_digest
            response.started.now_unix_s = event.now_unix_s
        case PromptLogprobs():
            response.prompt_logprobs.CopyFrom(event.to_proto())
        case ChoiceFinished():
            _write_finished(event, response.choice_finished)
        case Summary():
            response.summary.usage.CopyFrom(write_usage(event.usage))
            response.summary.timing.CopyFrom(_write_timing(event.timing))
    return response


def _read_chat(chat: inference_pb2.ChatPrompt) -> ChatPrompt:
    check_num_messages(len(chat.messages))
    check_num_tools(len(chat.tools))
    num_parts = sum(len(turn.content) + len(turn.tool_calls) for turn in chat.messages)
    if num_parts > MAX_PARTS:
        raise InvalidRequestError(
            f"have {num_parts} parts, more than {MAX_PARTS}", field="chat.messages"
        )
    calls = [call.arguments for turn in chat.messages for call in turn.tool_calls]
    check_arguments(calls, "chat.messages")
    messages = tuple(
        _read_message(turn, f"chat.messages[{index}]") for index, turn in enumerate(chat.messages)
    )
    says_parallel = chat.HasField("parallel_tool_calls")
    return ChatPrompt(
        messages,
        _read_arguments(chat),
        tools=tuple(map(_read_tool, chat.tools)),
        tool_choice=_read_choice(chat.tool_choice),
        required_tool=chat.required_tool,
        has_parallel_calls=chat.parallel_tool_calls if says_parallel else True,
        is_split=chat.split_reasoning,
        now_unix_s=chat.now_unix_s,
    )


def _read_tool(tool: inference_pb2.Tool) -> Tool:
    parameters = _plain_struct(tool.parameters) if tool.HasField("parameters") else None
    return Tool(tool.name, tool.description, parameters)


def _read_choice(choice: int) -> ToolChoice:
    try:
        return ToolChoice(choice)
    except ValueError:
        raise InvalidRequestError(f"{choice} is not known", field="chat.tool_choice") from None


def _read_message(turn: inference_pb2.ChatMessage, path: str) -> Message:
    texts = []
    for index, part in enumerate(turn.content):
        if part.WhichOneof("part") != "text":
            raise InvalidRequestError("only text is supported", field=f"{path}.content[{index}]")
        texts.append(part.text)
    return Message(
        role=turn.role,
        content="".join(texts),
        tool_calls=tuple(
            _read_tool_call(call, f"{path}.tool_calls[{index}]")
            for index, call in enumerate(turn.tool_calls)
        ),
        tool_call_id=turn.tool_call_id,
        reasoning=turn.reasoning,
        name=turn.name,
    )


def _read_tool_call(call: inference_pb2.ToolCall, path: str) -> ToolCall:
    arguments = read_arguments(call.arguments, f"{path}.arguments")
    return ToolCall(tool_call_id=call.id, name=call.name, arguments=arguments)


def _read_arguments(chat: inference_pb2.ChatPrompt) -> Mapping[str, object]:
    given = chat.template_arguments
    if given.ByteSize() > MAX_TEMPLATE_ARGUMENT_BYTES:
        raise InvalidRequestError(
            f"longer than {MAX_TEMPLATE_ARGUMENT_BYTES} bytes", field="chat.template_arguments"
        )
    return _plain_struct(given)


def _plain_struct(given: struct_pb2.Struct) -> dict[str, object]:
    return {name: _plain_value(value) for name, value in given.fields.items()}


def _plain_value(value: struct_pb2.Value) -> object:
    """As JSON would say it: a Struct knows no integers, so 3.0 becomes 3."""
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return _plain_struct(value.struct_value)
        case "list_value":
            return [_plain_value(item) for item in value.list_value.values]
    return None


def _write_finished(event: ChoiceFinished, finished: inference_pb2.ChoiceFinished) -> None:
    finished.choice = event.choice
    finished.reason = _WIRE_REASONS[event.reason]
    if isinstance(event.matched, str):
        finished.stop = event.matched
    elif event.matched is not None:
        finished.stop_token_id = event.matched


_WIRE_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
}


def write_usage(usage: Usage) -> inference_pb2.Usage:
    """The counts, as they go on the wire."""
    return inference_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_output_tokens=usage.num_output_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_resumed_tokens=usage.num_resumed_tokens,
    )


def _write_timing(timing: Timing) -> inference_pb2.Timing:
    path = inference_pb2.KVPath.Name(timing.kv_path)
    message = inference_pb2.Timing(
        queue_s=timing.queue_s,
        prefill_s=timing.prefill_s,
        first_write_s=timing.first_write_s,
        ttft_s=timing.ttft_s,
        handoff_gap_s=timing.handoff_gap_s,
        decode_s=timing.decode_s,
        total_s=timing.total_s,
        kv_path=path,
        num_attempts=timing.num_attempts,
        prefill_worker=timing.prefill_worker,
        decode_worker=timing.decode_worker,
        num_preemptions=timing.num_preemptions,
        num_computed_prompt_tokens=timing.num_computed_prompt_tokens,
    )
    transfer = timing.transfer
    if transfer is not None:
        message.transfer.CopyFrom(
            common_pb2.TransferStats(
                transport=transfer.transport,
                num_bytes=transfer.num_bytes,
                num_tokens=transfer.num_tokens,
                read_s=transfer.read_s,
                exposed_s=transfer.exposed_s,
                total_s=transfer.total_s,
                digest_s=transfer.digest_s,
            )
        )
    return message
