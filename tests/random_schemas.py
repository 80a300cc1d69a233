"""JSON schemas drawn at random, whose every text is short, and what jsonschema says of a text."""

import json
import random
from typing import Any

import jsonschema

Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """One whose longest text has some 150 characters, whitespace left out."""
    kinds = ["integer", "boolean", "enum", "string", "pattern", "anyOf"]
    if depth:
        kinds += ["object", "object", "array"]
    match rng.choice(kinds if depth < 2 else ["object"]):
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
        case "boolean":
            return {"type": "boolean"}
        case "enum":
            return {"enum": rng.sample(["red", "green", "blue", 7, None, True], rng.randint(1, 4))}
        case "string":
            return {"type": "string", "maxLength": rng.randint(1, 6)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^\\d{2}-\\d$"])}
        case "anyOf":
            return {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
        case "array":
            items = random_schema(rng, 0)
            return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
    names = rng.sample("abcdefgh", rng.randint(1, 1 + depth))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(1, len(names))),
        "additionalProperties": False,
    }


def check_text(text: str, schema: Schema) -> None:
    """Raise unless the text is JSON that fits."""
    jsonschema.validate(json.loads(text), schema)
