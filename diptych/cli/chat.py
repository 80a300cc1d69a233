"""``diptych chat``: a conversation with a model, line by line."""

import asyncio
import contextlib
import importlib
import io
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, create_model

from diptych import settings
from diptych.cli.chat_commands import EXITS, MANY_LINES, obey
from diptych.cli.connection import Connection, say_retry
from diptych.cli.conversation import Conversation
from diptych.cli.sampling_flags import read_options, sampling_fields
from diptych.cli.shown_answer import show_answer, write_text, write_thought
from diptych.cli.shown_line import shown
from diptych.cli.tool_file import Calls, read_tools, shown_call
from diptych.client import Chunk, DiptychClient
from diptych.errors import ConfigurationError, DiptychError, InvalidRequestError
from diptych.process import EXIT_FAILED
from diptych.v1 import inference_pb2

_UNANSWERED = "There is no answer."


class _ChatConfig(Connection):
    """Talk with a model, line by line; /help lists what else a line may be.

    Without a terminal, each line of standard input is one.
    """

    system: str = Field("", description="The system message; /system sets another one.")
    tools: Path | None = Field(
        None,
        description="JSON file of functions that the model may call. A call is shown, and the next "
        "line is its answer.",
    )
    tool_choice: Calls = Field(
        Calls.AUTO, description="Whether it calls them as it likes, or once for each line at least."
    )


ChatConfig = create_model(
    "ChatConfig", __base__=_ChatConfig, __doc__=_ChatConfig.__doc__, **sampling_fields()
)


def run(args: list[str]) -> int:
    """Talk until the input ends; 0, or 1 if there is nobody to talk with."""
    config = settings.load(ChatConfig, args, prog="diptych chat", env_prefix="DIPTYCH_CHAT_")
    with asyncio.Runner() as runner:
        try:
            options, tools = read_options(config), read_tools(config.tools, config.tool_choice)
            client = runner.run(_open(config))
        except ConfigurationError:
            raise
        except DiptychError as error:
            _complain(f"diptych chat: {error.reason}: {error.message}")
            return EXIT_FAILED
        try:
            conversation = Conversation(config.model, config.system, options, tools)
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
                line = self._read().strip()
                if line in EXITS:
                    return
                if line.startswith(MANY_LINES):
                    self._say(self._read_more(line.removeprefix(MANY_LINES)))
                else:
                    self._do(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                continue
            except DiptychError as error:
                _complain(f"{error.reason}: {error.message}")

    def _read(self, asker: str = "") -> str:
        """The next line, as characters that any process can be told. Raises EOFError: none."""
        try:
            prompt = f"{asker}{self._prompt}" if self._prompt else ""
            return input(prompt).encode(errors="replace").decode()
        except (EOFError, KeyboardInterrupt):
            if self._prompt:
                print()  # noqa: T201
            raise

    def _read_more(self, begin: str) -> str:
        """A text of several lines, to the one that ends it or to the end of the input."""
        lines = [begin]
        with contextlib.suppress(EOFError):
            while not lines[-1].endswith(MANY_LINES):
                lines.append(self._read("..").rstrip())
        return "\n".join(lines).removesuffix(MANY_LINES).strip("\n")

    def _do(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            print("\n".join(obey(self._conversation, line)), flush=True)  # noqa: T201
        else:
            self._say(line.removeprefix("/"))

    def _say(self, said: str) -> None:
        calls = self._answer(said) if said else ()
        while calls:
            self._answer_calls(calls)
            calls = self._answer(None)

    def _answer_calls(self, calls: Sequence[inference_pb2.ToolCall]) -> None:
        """Ask for what each comes to; who stops amid them has answered the rest so."""
        left = deque(calls)
        try:
            while left:
                self._conversation.call_answered(left[0], self._read(shown(left[0].name)).strip())
                left.popleft()
        finally:
            for call in left:
                self._conversation.call_answered(call, _UNANSWERED)

    def _answer(self, said: str | None) -> Sequence[inference_pb2.ToolCall]:
        """Show the answer; what has come of it is kept, however it ends; the calls in it.

        Raises DiptychError.
        """
        parts: list[str] = []
        thoughts: list[str] = []
        calls: list[inference_pb2.ToolCall] = []
        last: Chunk | None = None

        def write(text: str) -> None:
            parts.append(text)
            write_text(text)

        def think(text: str) -> None:
            thoughts.append(text)
            write_thought(text)

        request = self._conversation.request(said)
        try:
            answer = show_answer(
                self._client,
                request,
                write,
                self._timeout_s,
                write_call=calls.append,
                write_thought=think,
            )
            last = self._runner.run(answer)
            if thoughts and not calls and not "".join(parts):
                _complain("the answer ended within its thoughts; /set max_tokens gives it more")
        finally:
            if "".join(parts):
                print(flush=True)  # noqa: T201
            for call in calls:
                print(shown_call(call), flush=True)  # noqa: T201
            text, reasoning = "".join(parts), "".join(thoughts).strip("\n")
            self._conversation.answered(said, text, last, calls, reasoning)
            if last is None:  # nobody is asked for what they come to
                for call in calls:
                    self._conversation.call_answered(call, _UNANSWERED)
        return calls


async def _open(config: _ChatConfig) -> DiptychClient:
    """Raises DiptychError: nobody is there, or nobody who can chat."""
    client = config.client(say_retry)
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
    print(shown(line), file=sys.stderr, flush=True)  # noqa: T201
