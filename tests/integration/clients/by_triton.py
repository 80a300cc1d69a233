"""``python -m tests.integration.clients.by_triton ADDRESS MODEL``: what Triton's client is told.

A process of its own: the client's messages have the names that the router's have, and no process
can have both. It writes what it was told as JSON, and judges nothing.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

PROMPT = "The small river carries another letter, and then"
SAMPLING = {"temperature": "0", "max_tokens": "12", "ignore_eos": True}  # texts, as its example has

Told = dict[str, Any]


def text(name: str, value: str) -> triton.InferInput:
    made = triton.InferInput(name, [1], "BYTES")
    made.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return made


def flag(name: str, value: bool) -> triton.InferInput:
    made = triton.InferInput(name, [1], "BOOL")
    made.set_data_from_numpy(np.array([value], dtype=bool))
    return made


def inputs(stream: bool | None = None, **sampling: Any) -> list[triton.InferInput]:
    made = [
        text("text_input", PROMPT),
        text("sampling_parameters", json.dumps({**SAMPLING, **sampling})),
    ]
    return made if stream is None else [*made, flag("stream", stream)]


def told_of(result: Any) -> Told:
    """One response, by its tensors."""
    message = result.get_response()
    told: Told = {"id": message.id, "model": message.model_name}
    for output in message.outputs:
        values = result.as_numpy(output.name).tolist()
        told[output.name] = [v.decode() if isinstance(v, bytes) else v for v in values]
    if "triton_final_response" in message.parameters:
        told["is_final"] = message.parameters["triton_final_response"].bool_param
    return told


def refusal(call: Callable[[], object]) -> Told:
    try:
        call()
    except InferenceServerException as error:
        return {"status": error.status(), "message": error.message()}
    return {"status": "none", "message": "was not refused"}


def describe(client: Any, model: str) -> Told:
    config = client.get_model_config(model).config
    return {
        "is_live": client.is_server_live(),
        "is_ready": client.is_server_ready(),
        "has_model": client.is_model_ready(model),
        "has_another": client.is_model_ready("another"),
        "server": client.get_server_metadata().name,
        "inputs": [tensor.name for tensor in client.get_model_metadata(model).inputs],
        "optional": [tensor.name for tensor in config.input if tensor.optional],
        "is_decoupled": config.model_transaction_policy.decoupled,
        "max_batch_size": config.max_batch_size,
    }


def answer(client: Any, model: str) -> dict[str, Told]:
    wanted = [flag(f"return_{name}", True) for name in ("finish_reason", "num_input_tokens")]
    by_name = [triton.InferRequestedOutput("text_output")]
    without = flag("exclude_input_in_output", True)
    parameters = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return {
        "echoed": told_of(client.infer(model, [*inputs(), *wanted], request_id="mine")),
        "alone": told_of(client.infer(model, [*inputs(), without], outputs=by_name)),
        "by_parameters": told_of(
            client.infer(model, [text("text_input", PROMPT), without], parameters=parameters)
        ),
        "likely": told_of(
            client.infer(
                model,
                [
                    *inputs(logprobs=2, n=2),
                    without,
                    flag("return_logprobs", True),
                    flag("return_cumulative_logprob", True),
                ],
            )
        ),
        "choices": told_of(client.infer(model, [*inputs(n=2), without, *wanted])),
    }


def refuse(client: Any, model: str) -> dict[str, Told]:
    wrong_shape = triton.InferInput("text_input", [2], "BYTES")
    wrong_shape.set_data_from_numpy(np.array([b"a", b"b"], dtype=np.object_))
    shared = triton.InferInput("text_input", [1], "BYTES")
    shared.set_shared_memory("region", 8)
    calls = {
        "shape": lambda: client.infer(model, [wrong_shape]),
        "shared": lambda: client.infer(model, [shared]),
        "range": lambda: client.infer(model, inputs(top_p="2")),
        "stream": lambda: client.infer(model, inputs(stream=True)),
        "model": lambda: client.infer("another", inputs()),
        "id": lambda: client.infer(model, inputs(), request_id="a b"),
        "sequence": lambda: client.infer(model, inputs(), sequence_id=3),
        "timeout": lambda: client.infer(model, inputs(), timeout=1),
        "repository": client.get_model_repository_index,
        "region": lambda: client.register_system_shared_memory("region", "/key", 8),
        "statistics": lambda: client.get_inference_statistics(model),
    }
    return {name: refusal(call) for name, call in calls.items()}


def stream(client: Any, model: str) -> list[Told]:
    """Three requests over one stream, of which one is wrong and one wants no pieces."""
    came: SimpleQueue[Told] = SimpleQueue()

    def on_response(result: Any, error: Exception | None) -> None:
        came.put({"error": str(error)} if error is not None else told_of(result))

    counted = flag("return_num_output_tokens", True)
    ended = flag("return_finish_reason", True)
    client.start_stream(on_response)
    client.async_stream_infer(
        model,
        [*inputs(stream=True), counted, ended],
        request_id="pieces",
        enable_empty_final_response=True,
    )
    client.async_stream_infer(model, inputs(stream=True, top_k=-5), request_id="wrong")
    client.async_stream_infer(model, inputs(stream=False), request_id="whole")
    client.stop_stream()  # waits for all of them
    return [came.get() for _ in range(came.qsize())]


async def stream_as_its_example(address: str, model: str) -> list[Told]:
    """The asynchronous client, with the parameters said twice."""

    async def requests() -> AsyncIterator[Mapping[str, Any]]:
        for index in range(2):
            yield {
                "model_name": model,
                "inputs": inputs(stream=True),
                "outputs": [triton_aio.InferRequestedOutput("text_output")],
                "request_id": str(index),
                "parameters": {"temperature": "0.1", "max_tokens": "100"},
            }

    async with triton_aio.InferenceServerClient(address) as client:
        answers = client.stream_infer(inputs_iterator=requests())
        return [
            {"error": str(error)} if error is not None else told_of(result)
            async for result, error in answers
        ]


def main(address: str, model: str) -> None:
    with triton.InferenceServerClient(address) as client:
        told = {
            "described": describe(client, model),
            "answers": answer(client, model),
            "refusals": refuse(client, model),
            "stream": stream(client, model),
        }
    told["example"] = asyncio.run(stream_as_its_example(address, model))
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
