"""What people ask of a real model, through the whole stack: chat, its own end, filters, emoji.

SmolLM2 on one prefill and two decode workers. Each answer is transformers', by its tokens or
among what it would draw from; the text is what the tokens say.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import torch
from tokenizers import Tokenizer

from diptych.v1 import common_pb2, inference_pb2
from tests import hf_reference
from tests.call import generate, token_request
from tests.cluster import Cluster, Process, running_cluster
from tests.golden_rule import MARGIN, check_exact
from tests.notes import Note
from tests.waiting import until

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
EOS = "<|im_end|>"
# Every emoji is three tokens or more. The answer goes on with them: its first token, which the
# prefill worker samples, is the beginning of one, and decode has to bring the rest.
EMOJI = ("😀 🎉 🚀 " * 8).strip()
NUM_EMOJI_TOKENS = 60
STEPS_BEFORE_THE_KILL = 10
NUM_DRAWN = 24

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("text"),
        str(smollm2),
        num_decode=2,
        worker_flags={"num-blocks": "64", "max-model-len": "512"},
        router_flags={"local-prefill-below-tokens": "0"},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def emoji_ids(tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(EMOJI, add_special_tokens=False).ids
    return ids


def chat(text: str) -> inference_pb2.GenerateRequest:
    """One question, answered greedily until the model ends by itself."""
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(
            messages=[
                inference_pb2.ChatMessage(
                    role="user", content=[inference_pb2.ContentPart(text=text)]
                )
            ]
        ),
        sampling=inference_pb2.SamplingOptions(temperature=0.0, max_tokens=64, return_margins=True),
    )


async def test_a_question_is_answered_and_the_model_ends_by_itself(
    channel: grpc.aio.Channel, smollm2: Path, tokenizer: Tokenizer
) -> None:
    answer = await generate(channel, chat(QUESTION))
    assert answer.error is None, answer.error
    assert answer.text == ANSWER
    assert answer.finish_reason == common_pb2.FINISH_REASON_STOP
    assert not answer.finished.stop
    assert answer.timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
    assert answer.token_ids[-1] == tokenizer.token_to_id(EOS)
    prompt = hf_reference.chat_ids(smollm2, QUESTION)
    want = hf_reference.greedy(smollm2, prompt, len(answer.token_ids))
    check_exact(answer.token_ids, want.token_ids, want.margins, "chat")
    assert answer.usage.num_prompt_tokens == len(prompt)


async def test_a_character_is_split_between_the_workers(
    channel: grpc.aio.Channel, smollm2: Path, tokenizer: Tokenizer, emoji_ids: list[int]
) -> None:
    answer = await generate(channel, token_request(emoji_ids, max_tokens=NUM_EMOJI_TOKENS))
    assert answer.error is None, answer.error
    want = hf_reference.greedy(smollm2, emoji_ids, NUM_EMOJI_TOKENS)
    check_exact(answer.token_ids, want.token_ids, want.margins, "emoji")
    assert "\ufffd" in tokenizer.decode(want.token_ids[:1]), "the first token is a whole character"
    assert answer.text == tokenizer.decode(want.token_ids)
    assert "🎉" in answer.text
    assert "\ufffd" not in answer.text


async def test_a_stop_string_is_split_between_the_workers(
    channel: grpc.aio.Channel, emoji_ids: list[int]
) -> None:
    request = token_request(emoji_ids, max_tokens=NUM_EMOJI_TOKENS)
    request.sampling.stop.append("🎉")
    answer = await generate(channel, request)
    assert answer.error is None, answer.error
    assert (answer.text, answer.finished.stop) == (" ", "🎉")
    assert answer.finish_reason == common_pb2.FINISH_REASON_STOP


async def test_only_the_likeliest_pass_the_narrowest_filters(
    channel: grpc.aio.Channel, smollm2: Path
) -> None:
    prompt = hf_reference.chat_ids(smollm2, QUESTION)
    want = hf_reference.greedy(smollm2, prompt, 7)
    for name, value in (("top_k", 1), ("top_p", 1e-6)):
        request = token_request(prompt, max_tokens=7, temperature=2.0, seed=5, salt=name)
        setattr(request.sampling, name, value)
        answer = await generate(channel, request)
        assert answer.error is None, answer.error
        assert answer.token_ids == want.token_ids, name


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("top_p", 0.6)])
async def test_what_is_drawn_is_what_the_filter_lets_through(
    channel: grpc.aio.Channel, smollm2: Path, name: str, value: float
) -> None:
    """Of many seeds, over a hand-off: never a token that was filtered out, and not one alone."""
    prompt = hf_reference.chat_ids(smollm2, "Tell me about a river.")
    requests = []
    for seed in range(4):
        request = token_request(
            prompt, max_tokens=NUM_DRAWN, temperature=1.3, seed=seed, salt=f"{name}-{seed}"
        )
        setattr(request.sampling, name, value)
        requests.append(request)
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(generate(channel, request)) for request in requests]
    num_greedy = 0
    for task in asked:
        answer = task.result()
        assert answer.error is None, answer.error
        logits = hf_reference.logits(smollm2, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        for row, token_id in zip(logits, answer.token_ids, strict=True):
            assert float(row[token_id]) >= least_logit(row, name, value) - MARGIN
            num_greedy += int(row.argmax()) == token_id
    assert num_greedy < 4 * NUM_DRAWN
    assert len({tuple(task.result().token_ids) for task in asked}) == 4


def least_logit(row: torch.Tensor, name: str, value: float, temperature: float = 1.3) -> float:
    """Of the tokens that pass: the likeliest so many, or those that make up so much. [vocab]"""
    ordered = row.sort(descending=True).values
    if name == "top_k":
        return float(ordered[int(value) - 1])
    before = (ordered / temperature).softmax(0).cumsum(0)
    return float(ordered[int((before < value).sum())])


async def test_text_goes_on_exactly_when_the_decode_worker_dies(
    cluster: Cluster,
    channel: grpc.aio.Channel,
    smollm2: Path,
    tokenizer: Tokenizer,
    emoji_ids: list[int],
    note: Note,
) -> None:
    """A stop string that began before the kill is found after it; characters stay whole."""
    want = hf_reference.greedy(smollm2, emoji_ids, NUM_EMOJI_TOKENS)
    text = tokenizer.decode(want.token_ids)
    stop = text[3:30]  # it ends long after the kill
    request = token_request(emoji_ids, max_tokens=NUM_EMOJI_TOKENS, salt="killed")
    request.sampling.stop.append(stop)
    steps = {worker.name: num_steps(worker) for worker in cluster.decode}
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(generate(channel, request))
        victims: list[Process] = []

        def is_decoding() -> bool:
            victims[:] = [
                worker
                for worker in cluster.decode
                if num_steps(worker) >= steps[worker.name] + STEPS_BEFORE_THE_KILL
            ]
            return bool(victims)

        await until(is_decoding, 60, "a decode worker is in the middle of the answer")
        victims[0].kill()
    answer = asked.result()
    assert answer.error is None, answer.error
    assert answer.timing.num_attempts == 2
    assert answer.token_ids == want.token_ids[: len(answer.token_ids)]
    assert (answer.text, answer.finished.stop) == (text[:3], stop)
    note(f"went on after {STEPS_BEFORE_THE_KILL} to {len(answer.token_ids)} tokens")
    victims[0].start(victims[0].address)
    await asyncio.to_thread(victims[0].wait_listening)
    await cluster.wait_ready()
    await cluster.wait_baseline(within_s=5)


def num_steps(worker: Process) -> float:
    return worker.metric("diptych_engine_steps_total")


async def test_the_least_logit_of_a_filter() -> None:
    row = torch.tensor([2.0, 0.0, 1.0])
    assert least_logit(row, "top_k", 2) == 1.0
    shares: Sequence[float] = (row / 1.3).softmax(0).tolist()
    assert least_logit(row, "top_p", shares[0] - 0.01) == 2.0
    assert least_logit(row, "top_p", shares[0] + 0.01) == 1.0
