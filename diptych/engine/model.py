"""The decoder. Signatures first."""

from diptych.engine.model_config import ModelConfig
from diptych.engine.weights import DecoderWeights


class Decoder:
    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
