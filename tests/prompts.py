"""Made-up prompts for the tiny models."""


def prompt(length: int, seed: int = 1) -> list[int]:
    """Deterministic token ids of ``length``; no two seeds share a block."""
    return [3 + (i * 37 + i * i * seed + seed * 101) % 480 for i in range(length)]
