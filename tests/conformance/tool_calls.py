"""Fixtures of tool-call text that others wrote, through the parser of a model's family.

Run by ``make toolcalls``, which fetches the package ``canitoolcall`` beside everything else.
Each output is parsed whole and in random pieces, and judged by the package's own checks.
"""

import random
import sys
from collections import Counter

from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms

from diptych.text.response.families import AnswerForm, family
from diptych.text.response.parser import Parsed, ResponseParser

LEAST = 467  # of 469
NUM_CUTS = 20
FORMS = {
    "deepseek": AnswerForm.DEEPSEEK,
    "gemma4": AnswerForm.GEMMA4,
    "glm": AnswerForm.GLM,
    "gpt-oss": AnswerForm.GPT_OSS,
    "mistral": AnswerForm.MISTRAL,
    "qwen3-hermes": AnswerForm.HERMES,
    "qwen3-xml": AnswerForm.QWEN_XML,
}


def main() -> int:
    """The exit code: 1 if fewer than ``LEAST`` are right."""
    right, seen = Counter[str](), Counter[str]()
    for fixture in load_fixtures():
        form = _form_of(fixture)
        if form is None:
            continue
        seen[fixture.family] += 1
        problem = _problem(fixture, form)
        if problem:
            print(problem)  # noqa: T201 - its output
        else:
            right[fixture.family] += 1
    for name, count in seen.items():
        print(f"{name}: {right[name]} of {count}")  # noqa: T201
    print(f"all: {right.total()} of {seen.total()}")  # noqa: T201
    return 0 if right.total() >= LEAST else 1


def _form_of(fixture: Fixture) -> AnswerForm | None:
    """None: a family that is not ours."""
    if fixture.family == "kimi":
        return AnswerForm.KIMI_K3 if "Kimi-K3" in fixture.models[0] else AnswerForm.KIMI_K2
    if fixture.family == "llama":
        is_fourth = "Llama-4" in fixture.models[0]
        return AnswerForm.LLAMA_PYTHONIC if is_fourth else AnswerForm.LLAMA_JSON
    return FORMS.get(fixture.family)


def _problem(fixture: Fixture, form: AnswerForm) -> str:
    """What is wrong with how it is parsed; nothing: it is right."""
    whole = _parse(fixture, form, [fixture.raw_output])
    source = random.Random(fixture.id)
    for _ in range(NUM_CUTS):
        if _parse(fixture, form, _cut(fixture.raw_output, source)) != whole:
            return f"{fixture.id}: pieces say something else"
    calls = [{"name": call.name, "arguments_raw": call.arguments} for call in whole.calls]
    result = {
        "content": whole.content or None,
        "reasoning_content": whole.reasoning or None,
        "tool_calls": calls,
    }
    try:
        assert_conforms(fixture, result, soft=True, family=_FAMILIES[fixture.family])
    except AssertionError as error:
        return str(error)
    return ""


def _parse(fixture: Fixture, form: AnswerForm, pieces: list[str]) -> Parsed:
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = (
            _FAMILIES[fixture.family].reference_for(fixture.models[0]).default_generation_prompt
        )
    functions = [tool["function"] for tool in fixture.tools]
    tools = {each["name"]: each.get("parameters") or {} for each in functions}
    parser = ResponseParser(family(form.value), prompt or "", tools)
    parts = [*map(parser.feed, pieces), parser.finish(is_whole="truncated" not in fixture.tags)]
    return Parsed(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.calls),
    )


def _cut(text: str, source: random.Random) -> list[str]:
    pieces = []
    while text:
        size = source.choice((1, 1, 2, 3, 5, 9, 40))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


_FAMILIES = load_families()

if __name__ == "__main__":
    sys.exit(main())
