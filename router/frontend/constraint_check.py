"""Constraints are checked in a process of their own, so that none can take the router with it."""

import asyncio
import base64
import json
import logging
import signal
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from diptych.child_process import module_command
from diptych.constraint import Constraint
from diptych.errors import RETRY_LATER_S, InvalidRequestError, NoWorkerError
from diptych.text.mark import Mark
from diptych.text.thought_form import ThoughtForm
from router.frontend.checked_form import CheckedForm
from router.frontend.fair_places import FairPlaces

logger = logging.getLogger(__name__)

_PROGRAM: Final = "diptych.text.grammar_check"
_MAX_LINE_BYTES: Final = 2**20  # an answer: a constraint has 64 Ki characters at the most
_MAX_REMEMBERED: Final = 256
_MAX_REMEMBERED_CHARACTERS: Final = 8 * 2**20  # of their grammars, all together
_MAX_WAITING: Final = 256
_SOON_S: Final = 0.25  # nearly all take milliseconds
_FIRST: Final = b'{"kind": "choice", "texts": ["a"], "output": ""}\n'  # once it has started

_TOO_MUCH: Final = "it takes too much time or memory"
_DIED: Final = json.dumps({"problem": _TOO_MUCH}).encode()  # of what it was asked, it seems
_ENDED_BY_OTHERS: Final = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


class _Asked(NamedTuple):
    constraint: Constraint
    thoughts: ThoughtForm | None
    calls: tuple[Mark, ...]


class _Verdict(NamedTuple):
    """What is known of a constraint: its grammar, or why it has none."""

    form: CheckedForm
    problem: str
    num_fitting: int  # bytes of the output so far


def _num_characters(verdict: _Verdict | None) -> int:
    return 0 if verdict is None else len(verdict.form.grammar) + len(verdict.problem)


class _Checker:
    """One process that checks, begun when it is asked first. One asks it at a time."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._is_loading = False

    async def line(self, asked: bytes) -> bytes:
        """Its answer; none if somebody else ended it, so that another may be asked."""
        child = await self.start()
        if child is None:
            return b""
        assert child.stdin is not None
        assert child.stdout is not None
        line = b""
        try:
            with suppress(ConnectionError, RuntimeError):  # it ended: so says what it answers
                child.stdin.write(asked)
                await child.stdin.drain()
            line = await child.stdout.readline()
        finally:
            if not line.endswith(b"\n"):
                if line or not child.stdout.at_eof():  # somebody gave up: the answer is nobody's
                    with suppress(ProcessLookupError):
                        child.kill()
                self._child = None
        if line.endswith(b"\n"):
            return line
        code = await child.wait()
        logger.warning("the check of a constraint ended", extra={"code": code})
        is_others_doing = code in _ENDED_BY_OTHERS
        return b"" if is_others_doing else _DIED

    async def start(self) -> asyncio.subprocess.Process | None:
        """It, once it has loaded what it needs; None: it ended before it was asked anything.

        None too where the machine has no room for a process. Who gives up while it loads leaves it
        to the next, as it loads for all.
        """
        try:
            child = await self._running()
        except OSError as error:
            extra = {"error": str(error)}
            logger.warning("the check of constraints does not start", extra=extra)
            return None
        if self._is_loading:
            assert child.stdout is not None
            has_loaded = (await child.stdout.readline()).endswith(b"\n")
            self._is_loading = False
            if not has_loaded:
                self._child = None
                code = await child.wait()
                logger.warning("the check of constraints does not start", extra={"code": code})
                return None
        return child

    async def close(self) -> None:
        """End the process. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _running(self) -> asyncio.subprocess.Process:
        """Raises OSError: the machine has no room for it."""
        child = self._child
        if child is None or child.returncode is not None:
            child = self._child = await asyncio.create_subprocess_exec(
                *module_command(_PROGRAM),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # it would quote what clients say
                limit=_MAX_LINE_BYTES,
            )
            self._is_loading = True
            assert child.stdin is not None
            with suppress(ConnectionError, RuntimeError):  # it ended: so says what it answers
                child.stdin.write(_FIRST)
        return child


class ConstraintCheck:
    """Owns the processes: one begins with the first constraint, all end with ``close``.

    What does not take its time is answered by the first. What does is asked of a second one, with
    patience, and in the first's place comes another, so that nobody waits behind it for long. One
    that takes too much ends its process. What was asked for last is remembered. Event loop only.
    """

    def __init__(self) -> None:
        self.num_checked = 0
        """By a process: not from memory."""
        self._quick, self._patient = _Checker(), _Checker()
        self._quick_place, self._patient_place = (
            FairPlaces(1, _MAX_WAITING, "constraints wait to be checked") for _ in range(2)
        )
        self._known: OrderedDict[_Asked, _Verdict] = OrderedDict()
        self._num_known_characters = 0

    async def check(
        self,
        constraint: Constraint,
        emitted: bytes = b"",
        thoughts: ThoughtForm | None = None,
        calls: tuple[Mark, ...] = (),
        tenant: str = "",
    ) -> CheckedForm:
        """The constraint as a grammar, in which an output may begin with ``emitted``.

        ``thoughts`` may come before what the constraint is of, and calls in its place, which
        begin with one of the marks of ``calls``. Tenants are served by turns.

        Raises:
            InvalidRequestError: it cannot be held to, or what was emitted does not fit it.
            QueueFullError: too many wait to be checked.
            NoWorkerError: somebody ended the process, twice: nothing is known of the constraint.
        """
        asked = _Asked(constraint, thoughts, calls)
        known = self._decided(asked, emitted) or await self._ask(asked, emitted, tenant)
        if known.problem:
            raise InvalidRequestError(
                f"cannot be held to: {known.problem}",
                field=f"sampling.constraint.{constraint.kind.value}",
            )
        if known.num_fitting < len(emitted):
            raise InvalidRequestError(
                "is no output that fits sampling.constraint", field="emitted_token_ids"
            )
        return known.form

    async def close(self) -> None:
        """End the processes. Idempotent."""
        for each in (self._quick, self._patient):
            await each.close()

    def _decided(self, asked: _Asked, emitted: bytes) -> _Verdict | None:
        """What needs no process: an output has to be looked at, unless nothing can fit."""
        known = self._known.get(asked)
        return None if known is None or (emitted and not known.problem) else known

    def _remember(self, asked: _Asked, verdict: _Verdict) -> None:
        before = self._known.pop(asked, None)
        self._known[asked] = verdict
        self._num_known_characters += _num_characters(verdict) - _num_characters(before)
        while (
            len(self._known) > _MAX_REMEMBERED
            or self._num_known_characters > _MAX_REMEMBERED_CHARACTERS
        ):
            _, oldest = self._known.popitem(last=False)
            self._num_known_characters -= _num_characters(oldest)

    async def _ask(self, asked: _Asked, emitted: bytes, tenant: str) -> _Verdict:
        line = _line_of(asked, emitted)
        async with self._quick_place.place(tenant):
            decided = self._decided(asked, emitted)  # for another, while this one waited
            if decided is not None:
                return decided
            answered = await self._answered_soon(line)
            if answered:
                return self._verdict(asked, emitted, answered)
        async with self._patient_place.place(tenant):
            return self._decided(asked, emitted) or self._verdict(
                asked, emitted, await self._answered(line)
            )

    async def _answered(self, line: bytes) -> bytes:
        answered = await self._line(line)
        if not answered or answered == _DIED:  # a machine that stands still may look like that
            answered = await self._line(line)
        if not answered:
            raise NoWorkerError(
                "the constraint's check was ended twice by others, or does not start",
                retry_after_s=RETRY_LATER_S,
            )
        return answered

    def _verdict(self, asked: _Asked, emitted: bytes, answered: bytes) -> _Verdict:
        answer = json.loads(answered)
        if "problem" in answer:
            verdict = _Verdict(CheckedForm(""), answer["problem"], 0)
        else:
            thoughts = asked.thoughts
            if thoughts is not None:
                thoughts = replace(thoughts, has_gap=answer["has_gap"])
            form = CheckedForm(answer["grammar"], thoughts, asked.calls)
            verdict = _Verdict(form, "", answer["num_fitting"])
        if not (emitted and verdict.problem):  # the output may be to blame
            self._remember(asked, verdict)
        return verdict

    async def _answered_soon(self, line: bytes) -> bytes:
        """None if it takes its time, or ended the process."""
        if await self._quick.start() is None:
            return b""
        try:
            async with asyncio.timeout(_SOON_S):
                answered = await self._quick.line(line)
        except TimeoutError:
            return b""
        if answered == _DIED:
            return b""
        self.num_checked += bool(answered)
        return answered

    async def _line(self, asked: bytes) -> bytes:
        """See :meth:`_Checker.line`, of the patient one."""
        self.num_checked += 1
        return await self._patient.line(asked)


def _line_of(asked: _Asked, emitted: bytes) -> bytes:
    constraint, thoughts, calls = asked
    said: dict[str, object] = {
        "kind": constraint.kind,
        "texts": constraint.texts,
        "output": base64.b64encode(emitted).decode(),
        "calls": calls,
    }
    if thoughts is not None:
        said["thoughts"] = thoughts.to_plain()
    return json.dumps(said).encode() + b"\n"
