"""Bodies that schemathesis draws of OpenAI's own description of its API.

No answer may be a server's error, and each that is an answer has to fit the description, which is
the one in llm-comply. Prints one JSON object: of each operation how often which status came.
Raises AssertionError.
"""

import json
import sys
from collections import Counter
from importlib import resources
from typing import Any, Final

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

SERVED: Final = {
    "/models": ("get",),
    "/models/{model}": ("get",),
    "/completions": ("post",),
    "/chat/completions": ("post",),
    "/responses": ("post",),
    "/embeddings": ("post",),
}
SEED: Final = 5
PHASES: Final = (Phase.explicit, Phase.generate)  # what is found is not made smaller: it costs
BOUNDS: Final = {  # of an answer's tokens, by operation
    "POST /completions": "max_tokens",
    "POST /chat/completions": "max_completion_tokens",
    "POST /responses": "max_output_tokens",
}
MOST_TOKENS: Final = 8
TEXT: Final = "Say something."
PATIENCE_S: Final = 300.0  # its own is 10 s, which a busy machine may take


def description() -> dict[str, Any]:
    """Of what is served; absent values as JSON Schema says them.

    It forgets that vectors asked for in base64 are texts.
    """
    raw = resources.files("llm_comply").joinpath("specs/openai_chat.json").read_text("utf-8")
    said: dict[str, Any] = json.loads(raw)
    paths = {
        path: {method: said["paths"][path][method] for method in methods}
        for path, methods in SERVED.items()
    }
    vector = said["components"]["schemas"]["Embedding"]["properties"]
    vector["embedding"] = {"anyOf": [vector["embedding"], {"type": "string"}]}
    return {**said, "openapi": "3.1.0", "paths": paths, "components": _nullable(said["components"])}


def _nullable(schema: Any) -> Any:
    """``nullable`` is of OpenAPI 3.0: what it marks, or nothing."""
    if isinstance(schema, list):
        return [_nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    mapped = {name: _nullable(value) for name, value in schema.items() if name != "nullable"}
    return {"anyOf": [mapped, {"type": "null"}]} if schema.get("nullable") is True else mapped


def main(url: str, model: str, num_each: str) -> None:
    """Ask the server at ``url``, whose path ends with /v1, so many times by each operation."""
    asked: dict[str, Counter[int]] = {}
    drawn: Any = schemathesis.openapi.from_dict(description())
    for made in drawn.get_all_operations():
        operation = made.ok()
        asked[operation.label] = _ask(operation, url, model, int(num_each))
    print(json.dumps({label: dict(sorted(seen.items())) for label, seen in asked.items()}))  # noqa: T201 - its output


def _ask(operation: Any, url: str, model: str, num_each: int) -> Counter[int]:
    seen: Counter[int] = Counter()

    @seed(SEED)
    @settings(
        max_examples=num_each,
        database=None,
        deadline=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        _address(case, model, BOUNDS.get(operation.label))
        answer = case.call(base_url=url, timeout=PATIENCE_S)
        seen[answer.status_code] += 1
        checks: list[Any] = [not_a_server_error]
        if answer.status_code == 200 and "json" in answer.headers["content-type"][0]:
            checks.append(response_schema_conformance)
        case.validate_response(answer, checks=checks)

    ask()
    return seen


def _address(case: Any, model: str, bound: str | None) -> None:
    """To the model that is there, with something to go on, for a short answer."""
    if case.path_parameters:
        case.path_parameters["model"] = model
    if isinstance(case.body, dict):
        case.body["model"] = model
        for name in ("prompt", "input"):
            if name in case.body and not case.body[name]:  # mostly it draws nothing
                case.body[name] = TEXT
        if bound is not None:
            said = case.body.get(bound)
            case.body[bound] = min(said, MOST_TOKENS) if isinstance(said, int) else MOST_TOKENS


if __name__ == "__main__":
    main(*sys.argv[1:])
