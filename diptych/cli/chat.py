"""``diptych chat``: a conversation with a model, line by line."""

import asyncio
import contextlib
import importlib
import io
import sys

from pydantic import Field, create_model

from diptych import settings
from diptych.cli.chat_commands import EXIT, obey
from diptych.cli.connection import Connection
from diptych.cli.conversation import Conversation
from diptych.cli.sampling_flags import read_options, sampling_fields
from diptych.cli.shown_answer import show_answer
from diptych.client import Chunk, DiptychClient
from diptych.errors import ConfigurationError, DiptychError, InvalidRequestError

EXIT_REFUSED = 1


class _ChatConfig(Connection):
    """Talk with a model, line by line; /help lists what else a line may be.

    Without a terminal, each line of standard input is one.
    """

    system: str = Field("", description="The system message; /system sets another one.")


ChatConfig = create_model(
    "ChatConfig", __base__=_ChatConfig, __doc__=_ChatConfig.__doc__, **sampling_fields()
)


def run(args: list[str]) -> int:
    """Talk until the input ends; 0, or 1 if there is nobody to talk with."""
    config = settings.load(ChatConfig, args, prog="diptych chat", env_prefix="DIPTYCH_CHAT_")
    with asyncio.Runner() as runner:
        try:
            options = read_options(config)
            client = runner.run(_open(config))
        except ConfigurationError:
            raise
        except DiptychError as error:
            _complain(f"diptych chat: {error.reason}: {error.message}")
            return EXIT_REFUSED
        try:
            conversation = Conversation(config.model, config.system, options)
            _Chat(runner, client, conversation, config.timeout_s).run()
        finally:
            runner.run(client.close())
    return 0


class _Chat:
    """Reads a line and does it, until there is none. Owns the terminal; on the main thread.

    Ctrl-C cancels what ``runner`` runs, so it ends an answer, and its request with it.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        client: DiptychClient,
        conversation: Conversation,
        timeout_s: float | None,
    ) -> None:
        self._runner = runner
        self._client = client
        self._conversation = conversation
        self._timeout_s = timeout_s
        self._prompt = "> " if sys.stdin.isatty() else ""

    def run(self) -> None:
        """Until the input ends."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        if self._prompt:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # input() then edits, and knows earlier lines
            print("/help lists what else a line may be; Ctrl-D ends.")  # noqa: T201
        while True:
            try:
                line = self._read()
                if line == EXIT:
                    return
                self._do(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                continue
            except DiptychError as error:
                _complain(f"{error.reason}: {' '.join(error.message.split())}")

    def _read(self) -> str:
        """The next line, as characters that any process can be told. Raises EOFError: none."""
        try:
            return input(self._prompt).encode(errors="replace").decode().strip()
        except (EOFError, KeyboardInterrupt):
            if self._prompt:
                print()  # noqa: T201
            raise

    def _do(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            print("\n".join(obey(self._conversation, line)), flush=True)  # noqa: T201
        elif line:
            self._answer(line.removeprefix("/"))

    def _answer(self, said: str) -> None:
        """Show the answer; what has come of it is kept, however it ends. Raises DiptychError."""
        parts: list[str] = []
        last: Chunk | None = None

        def write(text: str) -> None:
            parts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()

        request = self._conversation.request(said)
        try:
            last = self._runner.run(show_answer(self._client, request, write, self._timeout_s))
        finally:
            if parts:
                print(flush=True)  # noqa: T201
            self._conversation.answered(said, "".join(parts), last)


async def _open(config: _ChatConfig) -> DiptychClient:
    """Raises DiptychError: nobody is there, or nobody who can chat."""
    client = config.client()
    try:
        model = await config.find_model(client)
        if not model.has_chat_template:
            raise InvalidRequestError(
                f"{model.name} has no chat template; diptych generate --prompt continues texts",
                field="model",
            )
    except DiptychError:
        await client.close()
        raise
    return client


def _complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201
