"""Functions that a chat may offer, as OpenAI's clients say them."""

from typing import Any


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("weather", city={"enum": ["Paris", "Rome"]}, days={"enum": [1, 2, 3]}),
    tool("clock", is_utc={"type": "boolean"}),
]
