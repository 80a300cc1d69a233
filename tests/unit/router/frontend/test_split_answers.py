"""The ids of an answer's calls."""

from router.frontend.split_answers import CallIds


def test_a_call_has_the_same_id_where_its_answer_is_resumed() -> None:
    first, again = CallIds("r 7 0", (1, 2)), CallIds("r 7 0", [1, 2])
    ids = [first.next_long(), first.next_long(), first.next_short()]
    assert ids == [again.next_long(), again.next_long(), again.next_short()]
    others = (CallIds("r 7 1", (1, 2)), CallIds("r 7 0", (1, 3)))
    assert len({ids[0], ids[1], *(each.next_long() for each in others)}) == 4
    assert len(ids[2]) == 9
    assert ids[2].isalnum()
