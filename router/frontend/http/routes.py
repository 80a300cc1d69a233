"""Which path is answered by what: the ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from diptych.errors import InvalidApiKeyError
from router.frontend.admission import Admission
from router.frontend.callers.callers import Callers
from router.frontend.generator import Generator
from router.frontend.http.answer_form import COMPLETION
from router.frontend.http.authenticated import Authenticated
from router.frontend.http.chat_form import CHAT
from router.frontend.http.chat_request import read_chat
from router.frontend.http.choices_form import ChoicesWriters
from router.frontend.http.completion_request import read_completion
from router.frontend.http.exchange import BodyRoom, Exchange
from router.frontend.http.generation import GenerationAnswers
from router.frontend.http.identified import Identified
from router.frontend.http.posted import Posted
from router.frontend.http.prompt_work import PromptRoutes
from router.frontend.http.refusals import crashed, unknown
from router.frontend.http.response_form import ResponseWriters
from router.frontend.http.response_request import read_response
from router.frontend.http.service import ServiceAnswers
from router.frontend.http.static_page import PAGE_PATHS, answer_page
from router.frontend.http.tokens import TokenAnswers
from router.frontend.prompt_answers import PromptAnswers
from router.frontend.validation import MOST_IDS


def make_app(
    admission: Admission,
    generator: Generator,
    prompts: PromptAnswers,
    service: ServiceAnswers,
    room: BodyRoom,
    callers: Callers,
) -> ASGIApp:
    """The application; ``room`` bounds the bodies of all its requests together."""
    tokens, alone = TokenAnswers(admission), PromptRoutes(admission, prompts)
    completions = GenerationAnswers(
        admission, generator, read_completion, ChoicesWriters(COMPLETION), most_ids=MOST_IDS
    )
    chats = GenerationAnswers(admission, generator, read_chat, ChoicesWriters(CHAT))
    responses = GenerationAnswers(admission, generator, read_response, ResponseWriters())
    posted = {
        "/v1/completions": Posted(completions, room, completions.refused),
        "/v1/chat/completions": Posted(chats, room, chats.refused),
        "/v1/responses": Posted(responses, room, responses.refused),
        "/v1/embeddings": Posted(alone.embeddings, room),
        **dict.fromkeys(("/score", "/v1/score"), Posted(alone.score, room)),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), Posted(alone.rerank, room)),
        "/tokenize": Posted(tokens.tokenize, room),
        "/detokenize": Posted(tokens.detokenize, room),
    }
    app = Starlette(
        routes=[
            *(Route(path, each, methods=["POST"]) for path, each in posted.items()),
            *(Route(path, answer_page) for path in sorted(PAGE_PATHS)),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/cluster", service.cluster),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
        ],
        exception_handlers={HTTPException: unknown, Exception: crashed},
    )
    app.router.redirect_slashes = False  # to http, behind a proxy that ends TLS: in the clear

    def record(path: str, exchange: Exchange, error: InvalidApiKeyError) -> None:
        route = posted.get(path)
        if route is not None:
            route.record(exchange, error)

    return Identified(Authenticated(app, callers, record))
