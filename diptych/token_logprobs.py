"""How likely the model found a token: plain data, from the sampler to the client. Pure."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from diptych.v1 import common_pb2


class TokenLogprobs(NamedTuple):
    """Natural logarithms, of the distribution before any sampling parameter changed it."""

    logprob: float  # of the token itself
    top_token_ids: tuple[int, ...]  # the likeliest, falling; as many as were asked for
    top_logprobs: tuple[float, ...]  # one for each of them

    @classmethod
    def from_proto(cls, message: common_pb2.TokenLogprobs) -> "TokenLogprobs":
        """As a worker sent it."""
        return cls(message.logprob, tuple(message.top_token_ids), tuple(message.top_logprobs))

    def to_proto(self) -> common_pb2.TokenLogprobs:
        """As it goes on the wire."""
        return common_pb2.TokenLogprobs(
            logprob=self.logprob,
            top_token_ids=self.top_token_ids,
            top_logprobs=self.top_logprobs,
        )

    def with_likeliest(self, most: int) -> "TokenLogprobs":
        """The same with at most so many of the likeliest."""
        if len(self.top_token_ids) <= most:
            return self
        return self._replace(
            top_token_ids=self.top_token_ids[:most], top_logprobs=self.top_logprobs[:most]
        )


def is_whole(messages: Iterable[common_pb2.TokenLogprobs]) -> bool:
    """Whether each can be told: all of it is numbers, of which each likely token has one."""
    return all(
        message.logprob < math.inf
        and len(message.top_token_ids) == len(message.top_logprobs)
        and all(each < math.inf for each in message.top_logprobs)
        for message in messages
    )


class PromptLogprobs(NamedTuple):
    """Those of consecutive tokens of a prompt, from the one at ``position`` on."""

    position: int
    logprobs: tuple[TokenLogprobs, ...]

    @classmethod
    def from_proto(cls, message: common_pb2.PromptLogprobs) -> "PromptLogprobs":
        """As a worker or a router sent them."""
        return cls(message.position, tuple(map(TokenLogprobs.from_proto, message.logprobs)))

    def to_proto(self) -> common_pb2.PromptLogprobs:
        """As they go on the wire."""
        logprobs = [found.to_proto() for found in self.logprobs]
        return common_pb2.PromptLogprobs(position=self.position, logprobs=logprobs)
