"""How many log probabilities an answer tells at once, all in memory until it is written. Pure."""

from typing import Final, NamedTuple

from diptych.errors import InvalidRequestError
from router.generation.request import GenerationRequest

MAX_LOGPROBS: Final = 32_768 * 21
"""Of a prompt of so many tokens, with 20 likeliest each: up to 400 MB, and 70 MB of JSON."""


class ToldLogprobs(NamedTuple):
    """Those of one request that stay in memory until it is answered.

    Which those are says its ``logprob_room``; without one they are written as they come, but for
    those of choices of which the best are told.
    """

    room: int
    num_of_prompt: int
    num_a_token: int
    """Of one more token of each choice; 0: those of the output do not count."""

    @classmethod
    def of(cls, request: GenerationRequest, num_prompt: int) -> "ToldLogprobs":
        """What is told of a request whose prompt has so many tokens."""
        given, room = request.sampling, request.logprob_room
        of_prompt, of_output = given.prompt_logprobs, given.logprobs
        a_token = 0 if of_output is None else given.num_drawn * (1 + of_output)
        if room is None:
            return cls(MAX_LOGPROBS, 0, a_token if given.num_drawn > given.num_choices else 0)
        return cls(
            room.num,
            0 if of_prompt is None else num_prompt * (1 + of_prompt),
            0 if room.is_of_prompt else a_token,
        )

    def max_tokens(self, most: int) -> int:
        """How many an output may have, up to ``most``, for which there is room; at least one."""
        if not self.num_a_token:
            return most
        return max(1, min(most, (self.room - self.num_of_prompt) // self.num_a_token))

    def check(self, max_tokens: int) -> int:
        """How many they are, with those of an output of so many tokens.

        Raises InvalidRequestError: there is no room for them.
        """
        of_output = max_tokens * self.num_a_token
        num = self.num_of_prompt + of_output
        if num > self.room:
            name = "prompt_logprobs" if self.num_of_prompt > of_output else "logprobs"
            raise InvalidRequestError(
                f"more than {MAX_LOGPROBS} log probabilities fit no answer in one piece, nor one "
                "that is the best of several: ask for fewer of each token, or of fewer tokens",
                field=f"sampling.{name}",
            )
        return num
