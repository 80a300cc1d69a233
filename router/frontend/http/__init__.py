"""The OpenAI-compatible HTTP API: a thin translation between JSON and the generator."""
