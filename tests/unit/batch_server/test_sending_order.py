"""Which lines of a batch are sent one after the other."""

import itertools
import random

from batch_server.runner.sending_order import SendingKey, ranks

SYSTEM = "You are a careful assistant. " * 25


def order(prompts: list[str]) -> list[int]:
    """The prompts' numbers, as they are sent."""
    placed = ranks(SendingKey.of(number, prompt) for number, prompt in enumerate(prompts))
    return sorted(placed, key=placed.__getitem__)


def test_questions_about_a_document_go_together() -> None:
    rng = random.Random(1)
    documents = [
        "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(3000, 7000))) for _ in range(40)
    ]
    asked = [(number, question) for question in range(5) for number in range(40)]
    rng.shuffle(asked)
    prompts = [SYSTEM + documents[number] + "q" * (20 + question) for number, question in asked]
    sent = [asked[number][0] for number in order(prompts)]
    assert sum(a == b for a, b in itertools.pairwise(sent)) == 40 * 4


def test_of_prompts_that_have_nothing_more_in_common_the_short_go_first() -> None:
    rng = random.Random(2)
    prompts = [
        SYSTEM + "".join(rng.choice("abc") for _ in range(rng.randint(1, 9000))) for _ in range(50)
    ]
    lengths = [len(prompts[number]) for number in order(prompts)]
    assert lengths == sorted(lengths)


def test_those_that_begin_alike_are_neighbours_however_short() -> None:
    assert order(["b2", "a1", "b1", "a2"]) in ([1, 3, 2, 0], [1, 3, 0, 2])


def test_half_a_character_is_no_text_and_no_error() -> None:
    assert order(["\ud800" * 3000, "x"]) == [1, 0]
