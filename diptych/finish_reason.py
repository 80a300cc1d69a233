"""Why an output ended, as every part of the system names it."""

import enum


class FinishReason(enum.IntEnum):
    """Values as on the wire (common.proto)."""

    STOP = 1  # a stop token, an end-of-sequence token or a stop string
    LENGTH = 2  # max_tokens, or the model's context length
    TOOL_CALLS = 3  # the output has calls of tools
