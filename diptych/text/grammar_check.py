"""Whether a constraint can be held to. A program of its own: some take for ever to compile.

It reads lines of JSON from standard input, and answers each with one::

    {"kind": "regex", "texts": ["a+"], "output": "YWE="}   # base64, of what was emitted
    {"grammar": "...", "num_fitting": 2}    or    {"problem": "..."}

With ``"calls"``, the marks that begin calls, these may stand in the answer's place.
With ``"thoughts"``, a plain :class:`diptych.text.thought_form.ThoughtForm`, the grammar is that of
thoughts and then the constraint, and the answer says ``"has_gap"``.

A line that takes longer than ``MAX_COMPILE_S`` of processor time, more memory than
``MAX_MEMORY_BYTES`` or a deeper stack than ``MAX_STACK_BYTES`` ends the program: the kernel sees
to it, whatever the library does. Workers compile on deeper stacks, so that none dies of what
passes here.
It checks bytes rather than tokens, so that it needs no model.
"""

import base64
import json
import random
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from diptych.constraint import MAX_GRAMMAR_BYTES
from diptych.text.call_form import or_calls
from diptych.text.grammars import LIMITS, REPLAY_S, REPLAYED_AT_ONCE
from diptych.text.literal_numbers import check_lark, check_schema
from diptych.text.mark import Mark
from diptych.text.thought_form import ThoughtForm

MAX_COMPILE_S: Final = 2.0
MAX_MEMORY_BYTES: Final = 2 * 2**30
MAX_STACK_BYTES: Final = 2**20  # half of the least that threads have by default
# An output drawn at random is followed so far. Real schemas take 5 ms for it, ambiguous grammars
# seconds: there each token of an output has more derivations than the one before.
_NUM_TRIED: Final = 256  # bytes
MAX_TRIED_S: Final = 0.1
_AMBIGUOUS: Final = "it is ambiguous: an output costs more with each token"
_MAX_PROBLEM_CHARACTERS: Final = 200
_REASON: Final = "error: "
_WHITESPACE: Final = r"[ \n]{1,8}"  # models end up in loops of what has no bound


# A directive, or the begin of a rule or a terminal with what Lark may write around its name. GBNF
# has ::= there, whatever its rules are called.
_LARK_LINE: Final = re.compile(
    r"^[ \t]*(?:%[a-z]|[?!]*\w+(?:\.-?\d+|\{[^}\n]*\})?\s*:(?!:=))", re.MULTILINE
)


def write_grammar(kind: str, texts: list[str]) -> str:
    """A constraint in llguidance's own form, not compiled. Raises ValueError."""
    match kind:
        case "json_schema":
            if texts[0].strip() == "false":
                raise ValueError("no value fits false")
            check_schema(texts[0])
            schema = "{}" if texts[0].strip() == "true" else texts[0]  # options need an object
            return llguidance.LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": _WHITESPACE}
            )
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(texts[0])
        case "grammar":
            check_lark(texts[0])
            return llguidance.LLMatcher.grammar_from_lark(_as_lark(texts[0]))
    lark = "start: " + " | ".join(map(_quoted, texts))
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _quoted(text: str) -> str:
    """As Lark has it, who takes no control characters: JSON leaves the last of them as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _as_lark(text: str) -> str:
    """A grammar that is written so, or as GBNF. Raises ValueError."""
    if _LARK_LINE.search(text):
        return text
    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001 - it has errors of its own
        raise ValueError(str(error)) from None
    return lark


def check(
    kind: str,
    texts: list[str],
    output: bytes,
    thoughts: ThoughtForm | None = None,
    calls: Sequence[Mark] = (),
) -> dict[str, object]:
    """The answer to one line."""
    try:
        answer = spelled = write_grammar(kind, texts)
        alone = matcher = _compiled(answer)
        _check_pace(alone)
        if calls:
            for mark in calls:
                _check_unlike(alone, mark, "calls")
            spelled = or_calls(answer, calls, has_tokens=False)
            answer = or_calls(answer, calls, has_tokens=True)
            matcher = _compiled(spelled)
        if thoughts is None:
            _check_length(answer)
            return {"grammar": answer, "num_fitting": _num_fitting(matcher, output)}
        thoughts = replace(thoughts, has_gap=not _may_begin_with_space(alone))
        if thoughts.open is not None and not thoughts.own_lead:
            _check_unlike(alone, thoughts.open, "thoughts")
        fitting = _compiled(thoughts.before(spelled, has_tokens=False))
        answer = thoughts.before(answer, has_tokens=True)
        _check_length(answer)
        num_fitting = _num_fitting(fitting, output)
    except ValueError as error:
        return {"problem": _one_line(str(error))}
    return {
        "grammar": answer,
        "num_fitting": num_fitting,
        "has_gap": thoughts.has_gap,
    }


def _check_length(grammar: str) -> None:
    """Raise ValueError: no worker would take it."""
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(f"as a grammar it has {num_bytes} bytes, more than {MAX_GRAMMAR_BYTES}")


def _compiled(grammar: str) -> llguidance.LLMatcher:
    """Raises ValueError."""
    matcher = llguidance.LLMatcher(_BYTES, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what has no first token shows only here
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _check_pace(matcher: llguidance.LLMatcher) -> None:
    """Raise ValueError: a token of an output costs more and more.

    Not what takes long only once: copies of a matcher share what they learn.
    """
    if not _keeps_pace(matcher) and not _keeps_pace(matcher):
        raise ValueError(_AMBIGUOUS)


def _keeps_pace(matcher: llguidance.LLMatcher) -> bool:
    tried, draw = matcher.deep_copy(), random.Random(0)
    until_s = time.thread_time() + MAX_TRIED_S
    for _ in range(_NUM_TRIED):
        mask = tried.compute_bitmask()
        fitting = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if tried.is_error() or time.thread_time() > until_s:
            return False
        if not fitting:
            break
        tried.consume_token(draw.choice(fitting))
    return True


def _may_begin_with_space(matcher: llguidance.LLMatcher) -> bool:
    mask = matcher.compute_bitmask()
    return any(mask[byte >> 3] >> (byte & 7) & 1 for byte in b" \n")


def _check_unlike(answer: llguidance.LLMatcher, mark: Mark, what: str) -> None:
    """Raise ValueError: nobody could tell such an answer from what begins with the mark."""
    begin = mark.text.encode()
    if answer.deep_copy().try_consume_tokens(list(begin)) == len(begin):
        raise ValueError(f"it may begin with {mark.text!r}, as this model's {what} do")


def _num_fitting(matcher: llguidance.LLMatcher, output: bytes) -> int:
    """How many bytes of an output fit. Raises ValueError: a worker would take too long for them."""
    begun_s = time.thread_time()
    for begin in range(0, len(output), REPLAYED_AT_ONCE):
        piece = output[begin : begin + REPLAYED_AT_ONCE]
        num_fitting: int = matcher.try_consume_tokens(list(piece))
        if num_fitting < len(piece):
            return begin + num_fitting
        if time.thread_time() - begun_s > MAX_TRIED_S + REPLAY_S * (begin + len(piece)):
            raise ValueError(_AMBIGUOUS)
    return len(output)


def main() -> None:
    """Answer until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the router ends first
    threading.stack_size(MAX_STACK_BYTES)
    answering = threading.Thread(target=_answer_all)
    answering.start()
    answering.join()


def _answer_all() -> None:
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)
        asked = json.loads(line)
        said = asked.get("thoughts")
        thoughts = None if said is None else ThoughtForm.from_plain(said)
        calls = [Mark.from_plain(mark) for mark in asked.get("calls", ())]
        output = base64.b64decode(asked["output"])
        answer = check(asked["kind"], asked["texts"], output, thoughts, calls)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _one_line(problem: str) -> str:
    """What a regular expression lacks stands behind a drawing of it."""
    first, *others = problem.strip().split("\n")
    marked = (each for each in others if each.startswith(_REASON))
    reason = next(marked, "").removeprefix(_REASON)[:_MAX_PROBLEM_CHARACTERS]
    first = (first or "nothing fits it")[: _MAX_PROBLEM_CHARACTERS - len(reason)]
    return f"{first} {reason}".rstrip()


_BYTES: Final = llguidance.LLTokenizer("byte")

if __name__ == "__main__":
    main()
