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
from router.generation.request import GenerationRequest, Prompt, TokenPrompt

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
        content = parse(data, self.admission.max_model_len)
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
            prompt = read_prompt(content.get("prompt"), self.admission.max_model_len)
        with self.admission.hold(len(data)):
            token_ids = await self._tokenize(exchange, content, prompt, len(data), names)
            await exchange.send_json(
                {
                    "count": len(token_ids),
                    "max_model_len": self.admission.max_model_len,
                    "tokens": token_ids,
                }
            )

    async def detokenize(self, exchange: Exchange, data: bytes) -> None:
        """The text of token ids. Raises DiptychError."""
        content = parse(data, self.admission.max_model_len)
        body = validated(_TokensBody, content)
        prompt = read_prompt(content.get("tokens"), self.admission.max_model_len, "tokens")
        if not isinstance(prompt, TokenPrompt):
            raise InvalidRequestError("should be a list of token ids", field="tokens")
        with self.admission.hold(len(data)):
            token_ids = await self._tokenize(exchange, content, prompt, len(data), _TOKENS_NAMES)
            text = self.admission.model.tokenizer.decode(
                token_ids, skip_special=body.skip_special_tokens
            )
            await exchange.send_json({"prompt": text})

    async def _tokenize(
        self,
        exchange: Exchange,
        content: Mapping[str, object],
        prompt: Prompt,
        num_bytes: int,
        names: Mapping[str, str],
    ) -> list[int]:
        body = validated(_Body, content)
        request = GenerationRequest(
            prompt=prompt, model=body.model or "", tenant=exchange.tenant, num_bytes=num_bytes
        )
        deadline_s = exchange.read_deadline_s()
        try:
            return await self.admission.tokenize(request, deadline_s)
        except InvalidRequestError as error:
            raise renamed(error, names) from None
