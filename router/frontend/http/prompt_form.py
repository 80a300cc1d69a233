"""What an answer says of its own prompt: its text, where it is echoed; how likely it was. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diptych.text.token_text import TokenText
from diptych.token_logprobs import PromptLogprobs
from router.frontend.http.json_parts import SmallItems
from router.frontend.http.logprob_form import CompletionLogprobs, by_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWish:
    """What a body wants to be told of the prompt."""

    echoes: bool = False
    """The answer's text begins with the prompt, its log probabilities with the prompt's."""
    num_top: int | None = None
    """What ``prompt_logprobs`` asks for; None: that member is not wanted."""
    num_echoed: int = 0
    """Of the likeliest tokens in each place, what ``logprobs`` tells where the prompt is echoed."""
    is_all: bool = False
    """Nothing is to follow the prompt: what the model goes on with is left out."""
    text: str | None = None
    """The prompt as the client wrote it; None: as token ids."""


@dataclass(slots=True)
class PromptForm:
    """Written once for each answer, from its first events."""

    wish: PromptWish
    text: TokenText
    logprobs: CompletionLogprobs | None = None
    """Gets the prompt's tokens first, where they are echoed."""
    echoed: str = ""
    _token_ids: Sequence[int] = ()
    _told: SmallItems[Mapping[str, object] | None] = field(
        default_factory=lambda: SmallItems([None])
    )

    def begin(self, token_ids: Sequence[int]) -> None:
        """The prompt, as it was tokenised."""
        self._token_ids = token_ids
        if not self.wish.echoes:
            return
        self.echoed = self._read(token_ids) if self.wish.text is None else self.wish.text
        if self.logprobs is not None:
            if self.wish.text is not None:
                self.logprobs.begin_with(self.wish.text)
            self.logprobs.add_first(token_ids[0])

    def add(self, part: PromptLogprobs) -> None:
        """What is told of the next of its tokens."""
        token_ids = self._token_ids[part.position : part.position + len(part.logprobs)]
        if self.wish.echoes and self.logprobs is not None:
            most = self.wish.num_echoed
            self.logprobs.add(token_ids, [found.with_likeliest(most) for found in part.logprobs])
        num_top = self.wish.num_top
        if num_top is not None:
            self._told += [
                by_token_id(self.text, token_id, found, num_top)
                for token_id, found in zip(token_ids, part.logprobs, strict=True)
            ]

    def members(self) -> Mapping[str, object]:
        """``prompt_logprobs`` as vLLM writes it, by token id; a token's rank where it is told."""
        return {} if self.wish.num_top is None else {"prompt_logprobs": self._told}

    def _read(self, token_ids: Sequence[int]) -> str:
        assembler = self.text.assembler()
        return "".join([*map(assembler.push, token_ids), assembler.flush()])
