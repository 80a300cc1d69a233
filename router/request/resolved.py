"""A request that was checked and in which nothing is open any more."""

from dataclasses import dataclass, replace

from diptych.sampling_params import SamplingParams
from diptych.text.mark import Mark
from diptych.text.thought_form import ThoughtForm
from router.placement.claim import NO_CLAIM, Claim
from router.request.emitted_tokens import RequestShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """What workers and the answer need."""

    shape: RequestShape
    sampling: SamplingParams  # as workers get it
    stop: tuple[str, ...] = ()  # the router's own affair, as are the next
    min_tokens_to_stop: int = 0  # before which no stop string ends the output
    includes_stop: bool = False  # the text ends with what ended the output
    cache_salt: bytes = b""
    num_choices: int = 1  # that are made
    num_best: int = 1  # and how many of them the client gets
    tells_logprobs: bool = False  # the client gets those of its tokens
    num_logprobs: int = 0  # at most, that are in memory until the answer is written
    claim: Claim = NO_CLAIM
    emitted_token_ids: tuple[int, ...] = ()  # the client has these already
    model_digest: str = ""  # of the weights that the answer has to be of; empty: any
    thoughts: ThoughtForm | None = None  # that a constraint lets come before the answer
    calls: tuple[Mark, ...] = ()  # that begin what it lets come in the answer's place
    own_end: str | None = None  # of the prompt, behind all that is inert; None: nothing is

    @property
    def num_tokens_at_most(self) -> int:
        """Of the prompt, once, and of all choices."""
        return len(self.shape.prompt_ids) + self.num_choices * self.shape.max_tokens

    @property
    def chooses(self) -> bool:
        """Whether the client gets only the best of the choices."""
        return self.num_best < self.num_choices

    def choice(self, index: int, model_digest: str) -> "ResolvedRequest":
        """What one choice alone would be. The first is told of the prompt.

        The others have to be of the weights with ``model_digest``; empty: of any.
        """
        if index == 0:
            return self
        seed = (self.sampling.seed + index) % 2**64
        return replace(
            self,
            sampling=replace(self.sampling, seed=seed),
            shape=replace(self.shape, told=None),
            model_digest=model_digest,
        )
