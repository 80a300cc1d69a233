"""``/tokenize`` and ``/detokenize``: what a prompt becomes, and what tokens say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diptych.errors import InvalidRequestError
from router.frontend.admission import Admission
from router.frontend.field_names import renamed
from router.frontend.http import unserved
from router.frontend.http.asked import COMMON_NAMES
from router.frontend.http.body import StrictModel, parse, validated
from router.frontend.http.chat_request import CHAT_NAMES, read_messages
from router.frontend.http.completion_request import PROMPT_NAMES, read_prompt
from router.frontend.http.exchange import Exchange
from router.frontend.http.tool_fields import read_tools
from router.frontend.validation import MOST_IDS, check_num_ids
from router.generation.request import GenerationRequest, Prompt, TextPrompt, TokenPrompt

_NAMES: Final = {**PROMPT_NAMES, **CHAT_NAMES, **COMMON_NAMES}
_TOKENS_NAMES: Final = {"tokens.ids": "tokens", **COMMON_NAMES}


class _Body(StrictModel):
    """The model may be left out: there is one."""

    model: str | None = None


class _TokensBody(StrictModel):
    skip_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class TokenAnswers:
    """Answers for the model that admission knows, within admission's bounds."""

    admission: Admission

    async def tokenize(self, exchange: Exchange, data: bytes) -> None:
        """The token ids of a text (``prompt``) or of a chat (``messages``). Raises DiptychError."""
        content = parse(data, self.admission.max_model_len, MOST_IDS)
        unserved.refuse(content, unserved.OF_TOKENS)
        prompt: Prompt
        names: Mapping[str, str] = _NAMES
        if content.get("messages") is not None:
            unserved.refuse(content, unserved.OF_CHAT)
            unserved.refuse_beside(content, ["prompt"], "messages")
            tools = read_tools(content)
            names = {**tools.names, **names}
            prompt = read_messages(content, tools)
        else:
            unserved.refuse(content, unserved.OF_COMPLETION)
            prompt = self._read_prompt(content, "prompt")
        with self.admission.hold(exchange.tenant, len(data)):
            deadline_s = exchange.read_deadline_s()
            request = _request(exchange, content, prompt, len(data))
            token_ids = await self._tokenize(request, deadline_s, names)
            await exchange.send_json(
                {
                    "count": len(token_ids),
                    "max_model_len": self.admission.max_model_len,
                    "tokens": token_ids,
                }
            )

    async def detokenize(self, exchange: Exchange, data: bytes) -> None:
        """The text of token ids. Raises DiptychError."""
        content = parse(data, self.admission.max_model_len, MOST_IDS)
        body = validated(_TokensBody, content)
        prompt = self._read_prompt(content, "tokens")
        if not isinstance(prompt, TokenPrompt):
            raise InvalidRequestError("should be a list of token ids", field="tokens")
        with self.admission.hold(exchange.tenant, len(data)):
            deadline_s = exchange.read_deadline_s()
            request = _request(exchange, content, prompt, len(data))
            token_ids = await self._tokenize(request, deadline_s, _TOKENS_NAMES)
            text = await self.admission.decode(
                token_ids,
                skip_special=body.skip_special_tokens,
                tenant=exchange.tenant,
                deadline_s=deadline_s,
            )
            await exchange.send_json({"prompt": text})

    def _read_prompt(self, content: Mapping[str, object], field: str) -> TextPrompt | TokenPrompt:
        return read_prompt(content.get(field), self.admission.max_model_len, field, check_num_ids)

    async def _tokenize(
        self, request: GenerationRequest, deadline_s: float | None, names: Mapping[str, str]
    ) -> list[int]:
        try:
            return await self.admission.tokenize(request, deadline_s)
        except InvalidRequestError as error:
            raise renamed(error, names) from None


def _request(
    exchange: Exchange, content: Mapping[str, object], prompt: Prompt, num_bytes: int
) -> GenerationRequest:
    body = validated(_Body, content)
    return GenerationRequest(
        prompt=prompt, model=body.model or "", tenant=exchange.tenant, num_bytes=num_bytes
    )
