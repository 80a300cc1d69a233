"""Constraints are checked by a process of its own, which none of them outlives for long."""

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio

from diptych.constraint import MAX_GRAMMAR_BYTES, Constraint
from diptych.errors import RETRY_LATER_S, InvalidRequestError, NoWorkerError
from diptych.text.mark import Mark
from diptych.text.thought_form import ThoughtForm
from router.frontend import constraint_check
from router.frontend.checked_form import CheckedForm
from router.frontend.constraint_check import ConstraintCheck, _Asked, _Verdict

ENDLESS = Constraint.json_schema(
    {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(10, 40)]}
)
LETTERS = Constraint.regex("a+")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[ConstraintCheck]:
    check = ConstraintCheck()
    yield check
    await check.close()
    await check.close()


async def test_a_good_one_is_asked_for_once(shared: ConstraintCheck) -> None:
    before = shared.num_checked
    first = await shared.check(LETTERS)
    assert await shared.check(LETTERS) == first
    assert shared.num_checked == before + 1
    assert json.loads(first.grammar)["grammars"]


async def test_so_is_a_bad_one(shared: ConstraintCheck) -> None:
    before = shared.num_checked
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="Invalid type") as caught:
            await shared.check(Constraint.json_schema({"type": "banana"}))
        assert caught.value.field == "sampling.constraint.json_schema"
    assert shared.num_checked == before + 1


async def test_what_was_emitted_has_to_fit(shared: ConstraintCheck) -> None:
    assert await shared.check(LETTERS, b"aaa") == await shared.check(LETTERS)
    with pytest.raises(InvalidRequestError) as caught:
        await shared.check(LETTERS, b"aab")
    assert caught.value.field == "emitted_token_ids"
    assert await shared.check(Constraint.choice("é\n"), "é".encode()[:1])


async def test_detail_25_what_a_resumed_output_thought_fits_whatever_it_is(
    shared: ConstraintCheck,
) -> None:
    thoughts = ThoughtForm(open=None, close=Mark.of("</t>", {"</t>": 7}))
    plain = await shared.check(LETTERS)
    checked = await shared.check(LETTERS, b"hm, b</t>\naa", thoughts)
    assert checked.thoughts == thoughts
    assert "<[7]>" in checked.grammar
    assert await shared.check(LETTERS) == plain, "another question"
    with pytest.raises(InvalidRequestError) as caught:
        await shared.check(LETTERS, b"hm, b</t>\nab", thoughts)
    assert caught.value.field == "emitted_token_ids"


async def test_one_without_end_is_refused_and_the_next_is_checked(shared: ConstraintCheck) -> None:
    with pytest.raises(InvalidRequestError, match="too much time"):
        await shared.check(ENDLESS)
    assert await shared.check(Constraint.choice("after"))
    before = shared.num_checked
    with pytest.raises(InvalidRequestError, match="too much time"):
        await shared.check(ENDLESS)
    assert shared.num_checked == before, "it is known now"


@pytest.mark.parametrize(
    "rules",
    ['s: s s | "a" | "b"', 's: s s | s s s | "a" | "b" | "c"', 's: b b b b b b\nb: s | "x" | ""'],
)
async def test_one_with_ever_more_derivations_is_refused(
    shared: ConstraintCheck, rules: str
) -> None:
    """Each mask would take longer than the one before, and all rows of a step wait for it."""
    with pytest.raises(InvalidRequestError, match="it is ambiguous"):
        await shared.check(Constraint.grammar(f"start: s\n{rules}"))


async def test_a_little_ambiguity_is_no_harm(shared: ConstraintCheck) -> None:
    rules = 'start: e\ne: e "+" e | e "*" e | "(" e ")" | NUM\nNUM: /[0-9]+/'
    assert await shared.check(Constraint.grammar(rules), b"1+2*(3+4)")


async def test_nobody_waits_for_those_that_take_for_ever(shared: ConstraintCheck) -> None:
    """Though each is another one, so that none is known."""
    schema = json.loads(ENDLESS.texts[0])
    endless = [Constraint.json_schema({**schema, "title": str(number)}) for number in range(2)]
    async with asyncio.TaskGroup() as tasks:
        bad = [tasks.create_task(refusal(shared, each)) for each in endless]
        await asyncio.sleep(0)
        assert await shared.check(Constraint.choice("meanwhile"))
        assert not any(each.done() for each in bad)


async def test_a_tenant_that_floods_it_keeps_another_waiting_for_one_of_its_own() -> None:
    check, order = Scripted(*[GOOD] * 9), list[str]()

    async def one(name: str) -> None:
        await check.check(Constraint.choice(name), tenant=name[0])
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        for name in (*(f"a{number}" for number in range(8)), "b0"):
            tasks.create_task(one(name))
    assert order.index("b0") <= 2


async def test_one_who_gives_up_takes_no_answer_of_anothers(shared: ConstraintCheck) -> None:
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(shared.check(Constraint.regex("gone")))
        others = [tasks.create_task(shared.check(Constraint.choice(f"x{i}"))) for i in range(3)]
        await asyncio.sleep(0)
        gone.cancel()
    assert gone.cancelled()
    for index, other in enumerate(others):
        assert f"x{index}" in other.result().grammar


async def test_a_process_that_starts_is_not_ended_by_who_gives_up_on_it() -> None:
    check, started = ConstraintCheck(), set[int]()
    others = {child.pid for child in psutil.Process().children()}
    try:
        for _ in range(100):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await check.check(LETTERS)
            started |= {child.pid for child in psutil.Process().children()} - others
            if started:
                break
        assert len((await check.check(LETTERS)).grammar) > 0
        assert {child.pid for child in psutil.Process().children()} - others == started
        assert len(started) == 1
    finally:
        await check.close()


async def test_one_that_does_not_start_says_nothing_of_the_constraint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check, program = ConstraintCheck(), constraint_check._PROGRAM
    try:
        monkeypatch.setattr(constraint_check, "_PROGRAM", "diptych.text.not_there")
        for _ in range(3):
            with pytest.raises(NoWorkerError, match="does not start"):
                await check.check(LETTERS)
        monkeypatch.setattr(constraint_check, "_PROGRAM", program)
        assert (await check.check(LETTERS)).grammar
    finally:
        await check.close()


@pytest.mark.parametrize("why", [errno.EMFILE, errno.EAGAIN, errno.ENOMEM])
async def test_where_no_process_can_be_begun_nothing_is_known_of_the_constraint(
    monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    """The router is out of files, its container of processes, or the machine of memory."""
    check, is_full = ConstraintCheck(), True
    begin = asyncio.create_subprocess_exec

    async def exec_(*command: str, **given: Any) -> asyncio.subprocess.Process:
        if is_full:
            raise OSError(why, os.strerror(why))
        return await begin(*command, **given)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", exec_)
    try:
        with pytest.raises(NoWorkerError, match="does not start") as caught:
            await check.check(LETTERS)
        assert caught.value.retry_after_s == RETRY_LATER_S
        is_full = False
        assert (await check.check(LETTERS)).grammar
    finally:
        await check.close()


async def test_one_that_ended_before_it_could_be_written_to_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check, begin, begun = ConstraintCheck(), asyncio.create_subprocess_exec, list[int]()

    async def exec_(*command: str, **given: Any) -> asyncio.subprocess.Process:
        child = await begin(*command, **given)
        begun.append(child.pid)
        if len(begun) == 1:

            def write(_: bytes) -> None:
                raise RuntimeError("the handler is closed")  # as uvloop says it

            monkeypatch.setattr(child.stdin, "write", write)
            child.kill()
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", exec_)
    try:
        assert (await check.check(LETTERS)).grammar
        assert len(begun) == 2
    finally:
        await check.close()


async def test_the_longest_is_not_too_long_for_workers(shared: ConstraintCheck) -> None:
    thoughts = ThoughtForm(open=None, close=Mark.of("</t>", {"</t>": 7}))
    for text in ("😀" * 65_500, "\x01" * 10_900):  # as JSON, of which there are 65,536 characters
        constraint = Constraint.json_schema({"description": text})
        checked = await shared.check(constraint, b"", thoughts, (Mark.of("<call>", {}),))
        assert len(checked.grammar.encode()) < MAX_GRAMMAR_BYTES


async def test_a_process_that_somebody_ends_is_replaced(shared: ConstraintCheck) -> None:
    await shared.check(Constraint.choice("before"))
    for index in range(3):
        child = next(
            each
            for each in psutil.Process().children()
            if "diptych.text.grammar_check" in each.cmdline()
        )
        child.kill()
        assert "good" in (await shared.check(Constraint.choice(f"good{index}"))).grammar


async def test_one_that_nests_deeper_than_a_workers_stack_bears_is_refused(
    shared: ConstraintCheck,
) -> None:
    """Whatever the stack of the router's own process is: that of a worker's thread counts."""

    def chain(num_rules: int) -> Constraint:
        rules = [f"r{i}: r{i + 1}" for i in range(num_rules)]
        return Constraint.grammar("\n".join(["start: r0", *rules, f'r{num_rules}: "a"']))

    assert await shared.check(chain(100))
    with pytest.raises(InvalidRequestError) as caught:
        await shared.check(chain(1500))
    assert caught.value.field == "sampling.constraint.grammar"


class Scripted(ConstraintCheck):
    """Its patient process answers as it is told to; nothing: somebody ended it."""

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self._answers = list(answers)

    async def _answered_soon(self, line: bytes) -> bytes:
        return b""

    async def _line(self, asked: bytes) -> bytes:
        await asyncio.sleep(0)
        return self._answers.pop(0).encode()


GOOD = '{"grammar": "g", "num_fitting": 0}'
BAD = '{"problem": "too much of it"}'
DIED = '{"problem": "it takes too much time or memory"}'


async def test_those_who_wait_for_the_same_are_answered_by_one_look() -> None:
    check = Scripted(GOOD, BAD)
    async with asyncio.TaskGroup() as tasks:
        good = [tasks.create_task(check.check(LETTERS)) for _ in range(16)]
    assert {each.result().grammar for each in good} == {"g"}
    async with asyncio.TaskGroup() as tasks:
        bad = [tasks.create_task(refusal(check, Constraint.regex("b"))) for _ in range(16)]
    assert {each.result() for each in bad} == {"sampling.constraint.regex"}


async def refusal(check: ConstraintCheck, constraint: Constraint) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await check.check(constraint)
    return caught.value.field


async def test_one_clients_output_spoils_no_constraint() -> None:
    check = Scripted(BAD, GOOD, BAD)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="too much"):
            await check.check(LETTERS, b"a" * 1000)
        assert (await check.check(LETTERS)).grammar == "g"


async def test_a_good_verdict_is_not_replaced() -> None:
    check = Scripted(GOOD, BAD)
    async with asyncio.TaskGroup() as tasks:
        first, second = (tasks.create_task(_tried(check)) for _ in range(2))
    assert (first.result(), second.result()) == ("g", "g"), "the second is not asked for again"
    assert (await check.check(LETTERS)).grammar == "g"


async def test_one_that_ends_the_process_is_asked_of_another_before_it_is_believed() -> None:
    """A machine that stands still may count as the process's time."""
    assert (await Scripted(DIED, GOOD).check(LETTERS)).grammar == "g"
    with pytest.raises(InvalidRequestError, match="too much time"):
        await Scripted(DIED, DIED).check(LETTERS)


async def test_two_kills_by_others_say_nothing_of_the_constraint() -> None:
    check = Scripted("", "", GOOD)
    with pytest.raises(NoWorkerError) as caught:
        await check.check(LETTERS)
    assert caught.value.retry_after_s == RETRY_LATER_S
    assert (await check.check(LETTERS)).grammar == "g"


async def _tried(check: ConstraintCheck) -> str:
    try:
        return (await check.check(LETTERS)).grammar
    except InvalidRequestError:
        return ""


async def test_of_large_grammars_few_are_remembered() -> None:
    check = ConstraintCheck()
    for number in range(100):
        asked = _Asked(Constraint.regex(f"a{{{number}}}"), None, ())
        verdict = _Verdict(CheckedForm("g" * 2**19), "", 0)
        check._remember(asked, verdict)
        check._remember(asked, verdict)
    assert 1 < len(check._known) <= 16
    assert check._num_known_characters == sum(len(v.form.grammar) for v in check._known.values())
    assert asked in check._known, "the newest"
