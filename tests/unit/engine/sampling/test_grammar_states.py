"""Which tokens a constraint lets through, and what else is asked for beside it."""

import json
import threading
from array import array
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from diptych.constraint import OutputGrammar
from diptych.engine.sampling.grammar_paces import MAX_SAVED_S, MIN_ALLOWANCE_S, REFUSED_S
from diptych.engine.sampling.grammar_states import MAX_STATES, GrammarStates
from diptych.engine.sampling.logit_edits import edit_logits
from diptych.engine.sampling.sampler import sample
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import History, SampledToken, SampleSpec
from diptych.errors import ConfigurationError, InvalidRequestError, StepFailedError
from diptych.sampling_params import SamplingParams
from diptych.text.grammars import (
    MAX_REMEMBERED,
    NO_TOKENIZER,
    REPLAY_S,
    REPLAYED_AT_ONCE,
    Compiled,
    Grammars,
    NoGrammars,
)
from diptych.text.mark import Mark
from diptych.text.thought_form import ThoughtForm
from diptych.text.tokenizer import Tokenizer
from tests.text_models import byte_level_tokenizer
from tests.tiny_model import write_tiny_model

VOCAB_SIZE = 512
ENDS = frozenset({2, 4})
PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("grammars"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture
def grammars(folder: Path) -> Grammars:
    return Grammars.from_folder(folder, VOCAB_SIZE)


def spec(
    grammar: str, output: list[int], number: int = 1, *, allow_stop: bool = True, **params: object
) -> SampleSpec:
    given = {"temperature": 0.0, "stop_token_ids": ENDS, **params}
    return SampleSpec(
        params=SamplingParams(constraint=OutputGrammar(grammar, ENDS), **given),  # type: ignore[arg-type]
        allow_stop=allow_stop,
        history=History(array("q", [*PROMPT, *output]), len(PROMPT)),
        key=SequenceKey("router", number),
    )


def allowed(states: GrammarStates, asked: SampleSpec) -> set[int]:
    found = states.constrain([asked])
    if found.refused:
        raise found.refused[0]
    mask = found.specs[0].allowed
    assert mask is not None
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def draw(states: GrammarStates, asked: SampleSpec, likeliest: int = 300) -> int:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, likeliest] = 9.0
    (drawn,) = sample(logits, states.constrain([asked]).specs, [9])
    assert isinstance(drawn, SampledToken)
    return drawn.token_id


def test_only_what_fits_is_allowed_and_all_ends_where_it_is_whole(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    states, a = GrammarStates(grammars), tokenizer.encode("a")
    assert allowed(states, spec('start: "a" "a"?', [])) == set(a)
    assert allowed(states, spec('start: "a" "a"?', a)) == {*a, *ENDS}
    assert allowed(states, spec('start: "a" "a"?', a * 2)) == ENDS


def test_an_end_whose_name_fits_as_text_is_for_where_it_is_whole(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """As where it is a piece of the vocabulary, and another file says that it is an end."""
    made = json.loads((folder / "tokenizer.json").read_text())
    made["added_tokens"] = [each for each in made["added_tokens"] if each["id"] not in ENDS]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    states = GrammarStates(Grammars.from_folder(tmp_path, VOCAB_SIZE))
    text, output = r"start: /[a-z<>]+!/", tokenizer.encode("a")
    spelt = set(tokenizer.encode("<", add_special=False))
    for number, so_far in enumerate(([], output)):
        admitted = allowed(states, spec(text, so_far, number))
        assert spelt <= admitted
        assert not admitted & ENDS
    assert allowed(states, spec(text, [*output, *tokenizer.encode("!")])) == ENDS


def test_detail_25_thoughts_and_an_answer_are_made_again_from_tokens(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """Wherever a sequence was preempted: amid thoughts, at their end, amid the answer."""
    marks = {"<pad>": 0, "<bos>": 1}
    form = ThoughtForm(open=Mark.of("<pad>", marks), close=Mark.of("<bos>", marks))
    text = form.before('start: "ab"', has_tokens=True)
    thought = tokenizer.encode("The river, \u00e9")
    output = [0, *thought, 1, *tokenizer.encode("\n"), *tokenizer.encode("ab")]
    whole = GrammarStates(grammars)
    for end in range(len(output) + 1):
        asked = spec(text, output[:end])
        admitted = allowed(whole, asked)
        assert admitted == allowed(GrammarStates(grammars), asked)
        assert not admitted & ENDS or end == len(output)
        if 1 < end < len(thought):
            assert len(admitted) > VOCAB_SIZE / 3
    assert admitted == ENDS


def test_a_state_is_made_again_from_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = "start: /[a-c]+-[0-9]{2}/"
    output = tokenizer.encode("abc-4")
    whole = GrammarStates(grammars)
    for end in range(len(output) + 1):  # moved by one each time, and made anew
        asked = spec(text, output[:end])
        assert allowed(whole, asked) == allowed(GrammarStates(grammars), asked)
    assert allowed(whole, spec(text, output[:2])) == allowed(
        GrammarStates(grammars), spec(text, output[:2])
    ), "an earlier place is found again, too"
    assert grammars.num_compiled == 1


def test_states_are_bounded(grammars: Grammars, tokenizer: Tokenizer) -> None:
    states, output = GrammarStates(grammars), tokenizer.encode("a")
    for number in range(MAX_STATES + 5):
        allowed(states, spec('start: "aa"', output, number))
    assert allowed(states, spec('start: "aa"', output, 0)) == set(output), "forgotten, and made"


def test_no_row_of_a_step_is_forgotten_however_many_there_are(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each finds that the one before it took its place."""
    states, output = GrammarStates(grammars), tokenizer.encode("a")
    rows = [spec('start: "a"*', output, number) for number in range(MAX_STATES + 5)]
    states.constrain(rows)
    compile_one, made = grammars.compile, list[str]()

    def compile_counted(text: str) -> Future[Compiled]:
        made.append(text)
        return compile_one(text)

    monkeypatch.setattr(grammars, "compile", compile_counted)
    assert not states.constrain(rows).refused
    assert not made, "from its first token on, in each step"


class CostlyGrammars:
    """A clock that is read before and behind what a matcher does; the latter costs."""

    def __init__(self) -> None:
        self.cost_s = 0.0
        self._now_s, self._num_readings = 0.0, 0

    def __call__(self) -> float:
        self._num_readings += 1
        self._now_s += 0.0 if self._num_readings % 2 else self.cost_s
        return self._now_s


def test_a_grammar_whose_masks_hold_up_other_rows_is_refused_from_then_on(
    grammars: Grammars,
) -> None:
    clock, slow, other = CostlyGrammars(), 'start: "a"*', 'start: "a"+'
    states = GrammarStates(grammars, clock=clock, wall_clock=lambda: 0.0)
    clock.cost_s = MIN_ALLOWANCE_S
    first = allowed(states, spec(slow, []))
    for _ in range(300):
        assert allowed(states, spec(slow, [])) == first, "as long as others can wait for"
    clock.cost_s = MAX_SAVED_S / 2
    for number in range(2):
        assert allowed(states, spec(slow, [], number)) == first, "or longer, but not for ever"
    clock.cost_s = MAX_SAVED_S / 8
    found = states.constrain([spec(slow, [], 3), spec(other, [], 4)])
    assert isinstance(found.refused[0], InvalidRequestError)
    assert (set(found.refused), found.refused[0].field) == ({0}, "sampling.constraint")
    clock.cost_s = 0.0
    with pytest.raises(InvalidRequestError, match="takes too long"):
        allowed(states, spec(slow, [], 9))
    assert allowed(states, spec(other, [], 9))


def test_a_state_that_takes_too_long_to_make_again_is_given_up_amid_its_tokens(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    clock, text = CostlyGrammars(), "start: /a+/"
    states = GrammarStates(grammars, clock=clock)
    output = tokenizer.encode("a" * 4000)
    num_pieces = len(output) // REPLAYED_AT_ONCE
    assert num_pieces > 8
    clock.cost_s = REPLAY_S * REPLAYED_AT_ONCE
    assert allowed(states, spec(text, output))
    clock.cost_s = MAX_SAVED_S / 4
    with pytest.raises(InvalidRequestError, match="takes too long"):
        allowed(states, spec(text, output, 2))
    assert clock._now_s < 2 * MAX_SAVED_S


def test_more_tokens_may_take_longer(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mask has to look at each of them."""
    clock = CostlyGrammars()
    monkeypatch.setattr(grammars, "vocab_size", 262_144)
    states = GrammarStates(grammars, clock=clock)
    clock.cost_s = 5 * MIN_ALLOWANCE_S
    for _ in range(300):
        assert allowed(states, spec('start: "a"*', []))


def test_a_mask_of_too_many_items_is_refused() -> None:
    """Long tokens, of which each has many derivations, in one mask."""
    made = byte_level_tokenizer()
    made.add_tokens(["ab" * number for number in range(1, 30)])
    grammars = Grammars(llguidance.LLTokenizer(made.to_str()))
    text = 'start: s\ns: s s | s s s | "a" | "b"'
    states, output = GrammarStates(grammars, clock=lambda: 0.0), made.encode("ba" * 40).ids
    for end in range(len(output)):
        found = states.constrain([spec(text, output[:end])])
        if found.refused:
            break
    assert 1 < end < len(output) - 1
    assert isinstance(found.refused[0], InvalidRequestError)
    assert found.refused[0].field == "sampling.constraint"


def test_rows_without_one_are_left_alone(grammars: Grammars) -> None:
    free = SampleSpec(params=SamplingParams(), allow_stop=True)
    assert GrammarStates(grammars).constrain([free]).specs == [free]
    assert GrammarStates(NO_TOKENIZER).constrain([free]).specs == [free]


def test_one_row_that_cannot_go_on_leaves_the_others(grammars: Grammars) -> None:
    asked = [spec('start: "a"', [300, 301], 1), spec('start: "a"', [], 2), spec("start: (", [], 3)]
    found = GrammarStates(grammars).constrain(asked)
    assert set(found.refused) == {0, 2}
    assert all(isinstance(error, InvalidRequestError) for error in found.refused.values())
    assert found.specs[1].allowed is not None
    refused = GrammarStates(NoGrammars("they are ill")).constrain(asked).refused
    assert set(refused) == {0, 1, 2}
    assert all("they are ill" in error.message for error in refused.values())


def test_other_rows_of_a_batch_keep_their_logits(grammars: Grammars, tokenizer: Tokenizer) -> None:
    free = SampleSpec(params=SamplingParams(), allow_stop=True)
    logits = torch.randn(3, VOCAB_SIZE)
    before = logits.clone()
    specs = GrammarStates(grammars).constrain([free, spec('start: "a"', []), free]).specs
    edit_logits(logits, specs)
    assert torch.equal(logits[0], before[0])
    assert torch.equal(logits[2], before[2])
    assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == tokenizer.encode("a")


def test_bad_words_and_min_tokens_yield_where_nothing_else_fits(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    states = GrammarStates(grammars)
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    bad = frozenset({(a,)})
    assert draw(states, spec('start: "a" | "b"', [], 1, bad_words=bad), a) == b
    assert draw(states, spec('start: "a"', [], 2, bad_words=bad), a) == a
    assert draw(states, spec('start: "a"+', [a], 3, allow_stop=False), 2) == a
    assert draw(states, spec('start: "a"', [a], 4, allow_stop=False), a) in ENDS
    assert draw(states, spec('start: "b"', [], 5, logit_bias={a: 100.0}), a) == b


@pytest.mark.parametrize("top_k", [0, 3, 50])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_filters_draw_from_what_fits(
    grammars: Grammars, tokenizer: Tokenizer, top_k: int, top_p: float
) -> None:
    fitting = {tokenizer.encode(each)[0] for each in "abc"}
    for seed in range(8):
        params: dict[str, Any] = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "seed": seed}
        asked = spec("start: /[abc]/", [], 1, **params)
        assert draw(GrammarStates(grammars), asked) in fitting


def test_no_tokenizer_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        Grammars.from_folder(tmp_path, VOCAB_SIZE)


@pytest.mark.parametrize("vocab_size", [510, 511, VOCAB_SIZE])
def test_the_tokenizer_may_have_more_tokens_than_the_model(folder: Path, vocab_size: int) -> None:
    """They fit free text as any other, and are never drawn."""
    grammars = Grammars.from_folder(folder, vocab_size)
    states = GrammarStates(grammars)
    assert grammars.vocab_size == vocab_size
    fitting = allowed(states, spec("start: /(.|\\n)*/", []))
    assert len(fitting) > 400
    assert max(fitting) == vocab_size - 1


def test_where_only_tokens_beyond_the_model_fit_nothing_does(folder: Path, tmp_path: Path) -> None:
    made = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_tokens([AddedToken("<image>", normalized=False, special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    states = GrammarStates(Grammars.from_folder(tmp_path, VOCAB_SIZE))
    with pytest.raises(InvalidRequestError, match="no token to go on with"):
        allowed(states, spec("start: <image>", []))


def test_tokens_are_special_as_the_files_beside_tokenizer_json_say(
    folder: Path, tmp_path: Path
) -> None:
    """Else answers would have tokens without a text, and no mark could be insisted on."""
    made = json.loads((folder / "tokenizer.json").read_text())
    made["added_tokens"] = [each for each in made["added_tokens"] if each["content"] != "<turn>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    turn, mark = made["model"]["vocab"]["<turn>"], len(made["model"]["vocab"])
    stated = {
        str(token_id): {"content": text, "special": True, "normalized": False}
        for token_id, text in ((turn, "<turn>"), (mark, "<mark>"))
    }
    settings = {"added_tokens_decoder": stated}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    states = GrammarStates(Grammars.from_folder(tmp_path, mark + 1))
    fitting = allowed(states, spec("start: /(.|\\n)*/", []))
    assert len(fitting) > 400
    assert not {turn, mark} & fitting
    asked = spec("start: <turn> | <mark>", [], 2)
    assert allowed(states, asked) == {turn, mark}


@pytest.mark.timeout(30)
def test_rows_whose_grammars_are_not_compiled_in_time_end_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one, slow = grammars.compile, Future[Compiled]()
    monkeypatch.setattr(
        grammars, "compile", lambda text: slow if "slow" in text else compile_one(text)
    )
    compile_one('start: "a"').result()
    states = GrammarStates(grammars, max_wait_s=0.01)
    asked = [spec('start: "slow"', [], 1), spec('start: "slow"', [], 2), spec('start: "a"', [], 3)]
    found = states.constrain(asked)
    assert set(found.refused) == {0, 1}
    assert all(isinstance(error, StepFailedError) for error in found.refused.values())
    assert found.specs[2].allowed is not None
    slow.set_result(compile_one('start: "slow"').result())
    assert not states.constrain(asked).refused, "once it is compiled"


def test_no_step_compiles_what_a_sequence_keeps(grammars: Grammars) -> None:
    """However many others were asked for meanwhile."""
    states, kept = GrammarStates(grammars), grammars.compile('start: "a"')
    first = kept.result()
    for number in range(2 * MAX_REMEMBERED):
        grammars.compile(f'start: "b{number}"').result()
    assert grammars.is_remembered('start: "a"', first)
    num_compiled = grammars.num_compiled
    assert allowed(states, spec('start: "a"', []))
    assert grammars.num_compiled == num_compiled
    assert grammars.compile('start: "a"') is kept
    grammars.forget('start: "a"', first)
    assert not grammars.is_remembered('start: "a"', first), "it was worn"


def test_what_nobody_waits_for_any_more_is_not_compiled(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars.from_folder(folder, tokenizer.vocab_size)
    begun, goes_on, compile_one = threading.Event(), threading.Event(), grammars._compile

    def slowly(text: str) -> Compiled:
        begun.set()
        assert goes_on.wait(30.0)
        return compile_one(text)

    monkeypatch.setattr(grammars, "_compile", slowly)
    first = grammars.compile('start: "a"')
    assert begun.wait(30.0)
    for number in range(5):
        grammars.compile(f'start: "b{number}"')  # and it is cancelled at once
    last = grammars.compile('start: "c"')
    goes_on.set()
    assert first.result(30.0).matcher is not None
    assert last.result(30.0).matcher is not None
    assert grammars.num_compiled == 2


def test_a_grammar_that_took_too_long_once_is_followed_again_later(grammars: Grammars) -> None:
    clock, text, now_s = CostlyGrammars(), 'start: "a"*', 50.0
    states = GrammarStates(grammars, clock=clock, wall_clock=lambda: now_s)
    running = allowed(states, spec(text, [], 0))
    clock.cost_s = 2 * MAX_SAVED_S
    with pytest.raises(InvalidRequestError, match="takes too long"):
        allowed(states, spec(text, []))
    clock.cost_s = 0.0
    with pytest.raises(InvalidRequestError, match="takes too long"):
        allowed(states, spec(text, [], 2))
    assert allowed(states, spec(text, [], 0)) == running, "not what runs beside it"
    now_s += REFUSED_S
    assert allowed(states, spec(text, [], 3))
