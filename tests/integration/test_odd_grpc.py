"""Whatever bytes a gRPC front end gets, it answers with a type, and nobody else is disturbed.

Ten thousand messages with ``--hypothesis-profile long``.
"""

import asyncio
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from hypothesis import settings

from diptych.open_inference import service_pb2
from diptych.rpc.call_end import CallEnd
from diptych.v1 import inference_pb2 as public
from router.frontend.grpc import SERVICE
from router.frontend.open_inference.servicer import SERVICE as OPEN_INFERENCE
from tests.call_ends import told
from tests.integration.odd_messages import odd_bytes
from tests.integration.router_rig import PATIENT, running
from tests.notes import Note
from tests.unit.router.frontend.open_inference.infer_requests import flag, request

IS_LONG = settings.get_current_profile_name() == "long"
NUM_MESSAGES = 10_000 if IS_LONG else 150
MAX_BYTES = 65_536
NUM_AT_ONCE = 8
NEIGHBOUR_EACH = 20  # messages
OK, WRONG = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
ALLOWED: Final = {OK, WRONG, grpc.StatusCode.NOT_FOUND}
OURS: Final = ("router", "diptych", "batch_server")  # loggers: what crashes is told of there

TEXTS = struct_pb2.Struct()
TEXTS.update({"a": 1.5, "b": ["c", None, {"d": True}]})
SCHEMA = struct_pb2.Struct()
SCHEMA.update({"type": "object", "properties": {"a": {"type": "integer"}}})
PART = public.ContentPart(text="What is it?")
CHAT = public.ChatPrompt(
    messages=[
        public.ChatMessage(role="system", content=[PART]),
        public.ChatMessage(role="user", content=[PART, PART]),
        public.ChatMessage(
            role="assistant",
            tool_calls=[public.ToolCall(id="c", name="clock", arguments='{"utc": true}')],
        ),
        public.ChatMessage(role="tool", content=[PART], tool_call_id="c"),
    ],
    template_arguments=TEXTS,
)
SAMPLING = public.SamplingOptions(
    temperature=0.5,
    top_k=5,
    top_p=0.9,
    seed=7,
    max_tokens=3,
    stop=["a", "b"],
    logit_bias={5: 1.5},
    logprobs=2,
    bad_words=["a"],
)
TOKENS = public.TokenPrompt(ids=[5, 6, 7])
INPUTS = [public.Input(text="a b"), public.Input(tokens=TOKENS)]
GOOD: Final[list[tuple[str, Message]]] = [
    ("Generate", public.GenerateRequest(text="The quiet garden", sampling=SAMPLING)),
    ("Generate", public.GenerateRequest(tokens=TOKENS, sampling=SAMPLING, request_id="r")),
    ("Generate", public.GenerateRequest(chat=CHAT, sampling=SAMPLING, cache_salt="s")),
    (
        "Generate",
        public.GenerateRequest(
            tokens=TOKENS,
            sampling=public.SamplingOptions(max_tokens=4, n=2, prompt_logprobs=1),
            priority=public.PRIORITY_BATCH,
            ttft_ms=9e5,
        ),
    ),
    (
        "Generate",
        public.GenerateRequest(tokens=TOKENS, sampling=SAMPLING, emitted_token_ids=[23]),
    ),
    ("ListModels", public.ListModelsRequest()),
    ("Tokenize", public.TokenizeRequest(text="The quiet garden")),
    ("Tokenize", public.TokenizeRequest(chat=CHAT)),
    ("Detokenize", public.DetokenizeRequest(token_ids=[5, 6, 7])),
    ("Embed", public.EmbedRequest(inputs=INPUTS, dimensions=4, normalize=False)),
    ("Score", public.ScoreRequest(text="The", continuations=INPUTS)),
    ("Score", public.ScoreRequest(continuations=INPUTS, request_id="r", cache_salt="s")),
    ("DescribeCluster", public.DescribeClusterRequest()),
]
MODEL = service_pb2.ModelReadyRequest(name="m")
INFER = request(flag("return_num_output_tokens"), max_tokens=3, n=2, temperature=0.5)
ALSO_INFER = service_pb2.ModelInferRequest(
    model_name="m",
    inputs=[
        service_pb2.ModelInferRequest.InferInputTensor(
            name="text_input",
            datatype="BYTES",
            shape=[1],
            contents=service_pb2.InferTensorContents(bytes_contents=[b"The quiet garden"]),
        )
    ],
    parameters={
        "max_tokens": service_pb2.InferParameter(int64_param=3),
        "timeout": service_pb2.InferParameter(int64_param=60_000_000),
        "n": service_pb2.InferParameter(string_param="2"),
    },
)
GOOD_INFERENCE: Final[list[tuple[str, Message]]] = [
    ("ServerLive", service_pb2.ServerLiveRequest()),
    ("ServerReady", service_pb2.ServerReadyRequest()),
    ("ServerMetadata", service_pb2.ServerMetadataRequest()),
    ("ModelReady", MODEL),
    ("ModelMetadata", service_pb2.ModelMetadataRequest(name="m")),
    ("ModelConfig", service_pb2.ModelConfigRequest(name="m", version="1")),
    *(("ModelInfer", each) for each in (INFER, ALSO_INFER) * 3),
    *(("ModelStreamInfer", each) for each in (INFER, ALSO_INFER) * 3),
    ("ModelStreamInfer", request(flag("stream"), max_tokens=3)),
]
# Each costs its compiler's process milliseconds, and may end it.
CONSTRAINED: Final[list[tuple[str, Message]]] = [
    (
        "Generate",
        public.GenerateRequest(
            text="The",
            sampling=public.SamplingOptions(
                max_tokens=3, constraint=public.Constraint(regex="[a-c]{3}")
            ),
        ),
    ),
    (
        "Generate",
        public.GenerateRequest(
            chat=public.ChatPrompt(
                messages=CHAT.messages,
                tools=[public.Tool(name="clock", description="tells", parameters=SCHEMA)],
                tool_choice=public.TOOL_CHOICE_REQUIRED,
            ),
            sampling=public.SamplingOptions(max_tokens=3),
        ),
    ),
]


def test_each_method_is_among_them() -> None:
    for good, file, service in (
        (GOOD, public, "Inference"),
        (GOOD_INFERENCE, service_pb2, "GRPCInferenceService"),
    ):
        methods = file.DESCRIPTOR.services_by_name[service].methods
        assert {name for name, _ in good} == {method.name for method in methods}


@pytest.mark.parametrize("service", [SERVICE, OPEN_INFERENCE])
async def test_every_message_gets_a_typed_answer(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture, note: Note, service: str
) -> None:
    good_ones = GOOD if service == SERVICE else GOOD_INFERENCE
    costly_ones = CONSTRAINED if service == SERVICE else GOOD_INFERENCE
    seen: Counter[grpc.StatusCode] = Counter()
    turns = iter(range(NUM_MESSAGES))
    with caplog.at_level(logging.ERROR):
        async with running(
            tiny_llama, 1, 1, timers=PATIENT, served_model_name="m", max_request_bytes=MAX_BYTES
        ) as cluster:
            cluster.decode[0].behaviour.tokens_per_step = 32

            async def send_some() -> None:
                for turn in turns:
                    rng = random.Random(turn)
                    name, good = rng.choice(costly_ones if turn % 25 == 0 else good_ones)
                    data = odd_bytes(rng, good)
                    method = f"/{service}/{name}"
                    code = await call(cluster.channel, method, data, f"message {turn} to {name}")
                    seen[code] += 1
                    if turn % NEIGHBOUR_EACH == 0:
                        await cluster.generate(timeout_s=100)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(NUM_AT_ONCE):
                    tasks.create_task(send_some())
            assert len(await cluster.generate()) == 6
    ours = [each for each in caplog.records if each.name.startswith(OURS)]
    assert not ours, [vars(record) for record in ours]
    counts = {code.name: count for code, count in seen.items()}
    note(f"{seen.total()} messages to {service}: {counts}")
    assert seen[OK] > NUM_MESSAGES // 20
    assert seen[WRONG] > NUM_MESSAGES // 5


async def call(channel: Any, method: str, data: bytes, what: str) -> grpc.StatusCode:
    """The code that answers it, which says what is wrong. The stubs want codecs for ``channel``."""
    try:
        if method.endswith("/Generate"):
            streaming = channel.unary_stream(method)
            events = [public.GenerateResponse.FromString(each) async for each in streaming(data)]
            assert events[-1].HasField("summary"), f"{what}: {data!r}"
        elif method.endswith("/ModelStreamInfer"):
            stream = channel.stream_stream(method)([data])
            async with told(CallEnd(stream)):
                answers = [answer async for answer in stream]
            last = service_pb2.ModelStreamInferResponse.FromString(answers[-1])
            return code_of(last.error_message, f"{what}: {data[:2000]!r}")
        else:
            unary = channel.unary_unary(method)
            await unary(data, timeout=60)
    except grpc.aio.AioRpcError as error:
        refusal = error
    else:
        return OK
    said = f"{what}: {refusal.code()} {refusal.details()} to {data[:2000]!r}"
    if len(data) > MAX_BYTES:  # more than gRPC itself takes beside what the router refuses
        assert refusal.code() in {WRONG, grpc.StatusCode.RESOURCE_EXHAUSTED}, said
        return refusal.code()
    assert refusal.code() in ALLOWED, said
    assert field_of(refusal) or refusal.code() is not WRONG, said
    return refusal.code()


def code_of(error_message: str, what: str) -> grpc.StatusCode:
    """A stream tells of a request that failed in a response."""
    if not error_message:
        return OK
    reason = error_message.partition(":")[0]
    assert reason in ("REQUEST_INVALID", "MODEL_NOT_FOUND"), f"{error_message} to {what}"
    return WRONG if reason == "REQUEST_INVALID" else grpc.StatusCode.NOT_FOUND


def field_of(error: grpc.aio.AioRpcError) -> str:
    """What the refusal names."""
    trailing: Any = error.trailing_metadata() or ()
    packed = dict(trailing)["grpc-status-details-bin"]
    for detail in status_pb2.Status.FromString(packed).details:
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            (violation,) = request.field_violations
            return str(violation.field)
    return ""
