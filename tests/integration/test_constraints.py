"""Outputs held to a form, by every way in and through whatever happens to the workers.

The model is random: without its constraint no output would ever fit.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import settings

from diptych.cli.generate import run
from diptych.client import Chunk, Constraint, DiptychClient, SamplingOptions, build_request
from diptych.errors import InvalidRequestError
from diptych.finish_reason import FinishReason
from tests.cluster import Cluster, running_cluster
from tests.random_schemas import check_text, random_schema
from tests.waiting import until

NUM_REQUESTS = 500 if settings.get_current_profile_name() == "long" else 40
NUM_AT_ONCE = 12
PROMPT = "The small river carries another letter, and then"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}

LONG_PATTERN = "[0-9]{200}"
LONG = Constraint.regex(LONG_PATTERN)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two decode workers, on which a dozen long outputs have too few blocks together."""
    with running_cluster(
        tmp_path_factory.mktemp("constraints"),
        str(tiny_llama),
        num_decode=2,
        worker_flags={"num-blocks": "64", "max-model-len": "300"},
        decode_flags={"num-blocks": "19"},
        router_flags={"local-prefill-below-tokens": "0"},
    ) as running:
        yield running


async def answer(client: DiptychClient, constraint: Constraint, **options: Any) -> list[Chunk]:
    given = SamplingOptions(constraint=constraint, **{"seed": 1, **options})
    return [chunk async for chunk in client.generate(PROMPT, options=given)]


def fits_schema(text: str) -> bool:
    check_text(text, SCHEMA)
    return True


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def token_ids_of(chunks: list[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        (Constraint.json_schema(SCHEMA), fits_schema),
        (Constraint.regex(r"[a-f]{3}-\d{2}"), lambda text: re.fullmatch(r"[a-f]{3}-\d{2}", text)),
        (Constraint.choice("yes", "no", "perhaps é\n"), ["yes", "no", "perhaps é\n"].__contains__),
        (Constraint.grammar('start: "a" start "b" | "c"'), None),
        (Constraint.grammar('root ::= "x" [0-9] [0-9]'), lambda t: re.fullmatch(r"x\d\d", t)),
    ],
)
async def test_every_kind_holds(
    client: DiptychClient, constraint: Constraint, fits: Any, temperature: float
) -> None:
    chunks = await answer(client, constraint, temperature=temperature, max_tokens=200)
    if chunks[-1].finish_reason is FinishReason.LENGTH and fits is None:
        assert text_of(chunks).startswith("a"), "it could go on for ever, and did"
        return
    assert chunks[-1].finish_reason is FinishReason.STOP
    text = text_of(chunks)
    assert fits(text) if fits else re.fullmatch("(a*)c(b*)", text), text


async def test_the_first_token_is_held_to_it_too(client: DiptychClient) -> None:
    """It is the prefill worker's; a greedy one without would be another."""
    free = [chunk async for chunk in client.generate(PROMPT, options=GREEDY)]
    held = await answer(client, Constraint.regex("[0-9]{4}"), temperature=0.0)
    assert not text_of(free)[:1].isdigit()
    assert text_of(held).isdigit()
    assert held[-1].timing is not None
    assert held[-1].timing.prefill_worker


GREEDY = SamplingOptions(temperature=0.0, max_tokens=2)


async def test_a_resumed_output_goes_on_as_it_would_have(client: DiptychClient) -> None:
    constraint = Constraint.json_schema(SCHEMA)
    options = SamplingOptions(constraint=constraint, seed=3, max_tokens=200)
    whole = token_ids_of([chunk async for chunk in client.generate(PROMPT, options=options)])
    for cut in (1, len(whole) // 2, len(whole) - 1):
        request = build_request(PROMPT, options=options, emitted_token_ids=whole[:cut])
        rest = [chunk async for chunk in client.stream(request)]
        assert whole[:cut] + token_ids_of(rest) == whole
    wrong = build_request(PROMPT, options=options, emitted_token_ids=[*whole[:3], whole[0]])
    with pytest.raises(InvalidRequestError) as caught:
        _ = [chunk async for chunk in client.stream(wrong)]
    assert caught.value.field == "emitted_token_ids"


async def test_what_else_is_said_counts_as_far_as_it_can(client: DiptychClient) -> None:
    """min_tokens, bad words, biases and stops beside a constraint."""
    vowels = Constraint.regex("[ae]{1,9}")
    longer = await answer(client, vowels, min_tokens=6, temperature=0.0)
    assert len(token_ids_of(longer)) > 5, "there was something else than to stop"
    short = await answer(client, Constraint.choice("no"), min_tokens=50)
    assert (text_of(short), short[-1].finish_reason) == ("no", FinishReason.STOP)
    without = await answer(client, vowels, bad_words=("a",), min_tokens=4)
    assert set(text_of(without)) == {"e"}
    forced = await answer(client, Constraint.choice("no"), bad_words=("no", "n", "o"))
    assert text_of(forced) == "no"
    stopped = await answer(client, Constraint.regex("x{3}-y{3}"), stop=("-",))
    assert (text_of(stopped), stopped[-1].finish_reason) == ("xxx", FinishReason.STOP)
    logged = await answer(client, Constraint.regex("[0-9]{2}"), logprobs=2, temperature=0.0)
    tops = [found for chunk in logged for found in chunk.logprobs]
    first = token_ids_of(logged)[0]
    assert tops[0].top_token_ids[0] != first, "log probabilities are the model's own"
    with pytest.raises(InvalidRequestError) as caught:
        await answer(client, vowels, ignore_eos=True)
    assert caught.value.field == "sampling.ignore_eos"


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint.json_schema({"type": "banana"}), "json_schema"),
        (Constraint.json_schema("{"), "json_schema"),
        (Constraint.json_schema({"not": {"type": "string"}}), "json_schema"),
        (Constraint.json_schema('{"items":' * 3000), "json_schema"),
        (Constraint.regex("(a"), "regex"),
        (Constraint.regex("(?=a)b"), "regex"),
        (Constraint.regex(""), "regex"),
        (Constraint.regex("a" * 70_000), "regex"),
        (Constraint.regex("\ud800"), "regex"),
        (Constraint.grammar('start: "a'), "grammar"),
        (Constraint.grammar("start: " + "(" * 20_000), "grammar"),
        (Constraint.choice(), "choice.texts"),
        (Constraint.choice("a", ""), "choice.texts[1]"),
    ],
)
async def test_what_cannot_be_held_to_is_refused_before_any_work(
    cluster: Cluster, client: DiptychClient, constraint: Constraint, field: str
) -> None:
    before = cluster.prefill[0].metric("diptych_leases_ended_total")
    if "\ud800" in constraint.texts:
        with pytest.raises(InvalidRequestError, match="is no character"):
            await answer(client, constraint)
        return
    with pytest.raises(InvalidRequestError) as caught:
        await answer(client, constraint)
    assert caught.value.field == f"sampling.constraint.{field}"
    assert len(caught.value.message) < 400
    assert cluster.prefill[0].metric("diptych_leases_ended_total") == before


FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
    {"extra_body": {"json_schema": json.dumps(SCHEMA)}},
]


@pytest.mark.parametrize("said", FORMATS)
async def test_json_under_the_names_of_other_servers(
    openai_client: openai.AsyncOpenAI, tiny_llama: Path, said: dict[str, Any]
) -> None:
    made = await openai_client.chat.completions.create(
        model=tiny_llama.name, messages=[{"role": "user", "content": "hi"}], seed=2, **said
    )
    choice = made.choices[0]
    any_object = said.get("response_format") == {"type": "json_object"}
    assert choice.message.content is not None
    if any_object:  # it may be of any length
        assert choice.message.content.startswith("{")
    else:
        assert choice.finish_reason == "stop"
        check_text(choice.message.content, SCHEMA)


@pytest.mark.parametrize(
    ("said", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"structured_outputs": {"grammar": 'root ::= "q" "r"'}}, "qr"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_grammar": 'start: "q" "r"'}, "qr"),
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"ebnf": 'root ::= "q" "r"'}, "qr"),
    ],
)
async def test_other_forms_under_the_names_of_other_servers(
    openai_client: openai.AsyncOpenAI, tiny_llama: Path, said: dict[str, Any], pattern: str
) -> None:
    stream = await openai_client.completions.create(
        model=tiny_llama.name, prompt=PROMPT, stream=True, extra_body=said
    )
    text = "".join([piece.choices[0].text async for piece in stream if piece.choices])
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_detail_18_of_constraints_names_the_field(
    openai_client: openai.AsyncOpenAI, tiny_llama: Path, said: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client.completions.create(model=tiny_llama.name, prompt="x", extra_body=said)
    assert caught.value.param == param


async def test_generate_has_flags_for_it(
    cluster: Cluster, client: DiptychClient, capsys: pytest.CaptureFixture[str]
) -> None:
    address = ["--address", cluster.router.address, "--prompt", PROMPT]
    assert await asyncio.to_thread(run, [*address, "--json-schema", json.dumps(SCHEMA)]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), SCHEMA)
    assert await asyncio.to_thread(run, [*address, "--choice", "up", "--choice", "down"]) == 0
    assert capsys.readouterr().out.strip() in ("up", "down")
    assert await asyncio.to_thread(run, [*address, "--regex", "a", "--choice", "b"]) == 1
    assert "REQUEST_INVALID" in capsys.readouterr().err


async def test_random_schemas_hold_through_preemption_and_a_killed_worker(
    cluster: Cluster, client: DiptychClient
) -> None:
    """Every fifth is a long one, so that a few always outgrow the worker that is left."""
    await cluster.start_again(cluster.decode[0])
    num_retries = cluster.router.metric("diptych_retries_total")
    rng = random.Random(7)
    schemas = [random_schema(rng) if n % 5 else None for n in range(NUM_REQUESTS * 5 // 4)]
    waiting = asyncio.Semaphore(NUM_AT_ONCE)
    done: list[int] = []
    preempted: list[int] = []

    async def one(index: int) -> None:
        schema = schemas[index]
        async with waiting:
            chunks = await answer(
                client,
                Constraint.json_schema(schema) if schema is not None else LONG,
                seed=index,
                temperature=1.0 if index % 3 else 0.0,
                top_k=50 if index % 2 else None,
                max_tokens=250,
            )
        assert chunks[-1].finish_reason is FinishReason.STOP, text_of(chunks)
        if schema is not None:
            check_text(text_of(chunks), schema)
        else:
            assert re.fullmatch(LONG_PATTERN, text_of(chunks))
        done.append(index)
        assert chunks[-1].timing is not None
        preempted.append(chunks[-1].timing.num_preemptions)

    async def kill_one() -> None:
        while len(done) < len(schemas) // 3:
            await asyncio.sleep(0.01)
        victim = cluster.decode[0]
        await until(lambda: victim.metric("diptych_sequences_running") > 0, what="it computes")
        victim.kill()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kill_one())
        for index in range(len(schemas)):
            tasks.create_task(one(index))
    assert len(done) == len(schemas)
    assert sum(preempted) > 0, "nothing was preempted"
    assert cluster.router.metric("diptych_retries_total") > num_retries, "no request was hit"
