"""Which part of a model one of several processes has. Pure; no torch.

Each process (a rank) has the same number of heads, of the feed-forward part's inner columns
and of the vocabulary's rows, one after another in the order of the ranks.
"""

from dataclasses import replace
from typing import NamedTuple

from diptych.engine.model.config import ModelConfig
from diptych.errors import ConfigurationError


class RankShare(NamedTuple):
    """Part ``rank`` of ``size`` equal ones."""

    rank: int
    size: int

    def part(self, count: int) -> range:
        """Which of ``count`` are this rank's."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def of(self, config: ModelConfig) -> ModelConfig:
        """The decoder that a rank computes; its vocabulary is told as the whole one.

        Raises:
            ConfigurationError: the model cannot be cut into so many equal parts.
        """
        for key, count in (
            ("num_attention_heads", config.num_heads),
            ("num_key_value_heads", config.num_kv_heads),
            ("intermediate_size", config.intermediate_size),
            ("vocab_size", config.vocab_size),
        ):
            if count % self.size:
                raise ConfigurationError(
                    f"tensor_parallel: {self.size} ranks cannot share the model's {key}={count} "
                    "evenly"
                )
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            intermediate_size=config.intermediate_size // self.size,
        )


WHOLE = RankShare(0, 1)
