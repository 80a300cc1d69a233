"""What an agent's process knows of its worker's environment, and when it counts as silent."""

import pytest

from kvtransfer.transports.agent_process import Answers, environment


@pytest.fixture
def answers() -> Answers:
    """Of a process that was started at 0 and has said that it is there."""
    answers = Answers(0.0, interval_s=0.5)
    answers.heard()
    return answers


def test_a_process_is_silent_from_the_first_question_that_it_leaves_open(answers: Answers) -> None:
    assert answers.check(0.5) == 0.0
    assert answers.asks(0.5)
    assert answers.check(1.0) == 0.5
    assert not answers.asks(1.0)
    assert answers.check(1.5) == 1.0


def test_a_process_that_is_not_ready_is_silent_since_its_start() -> None:
    answers = Answers(0.0, interval_s=0.5)
    assert not answers.asks(0.5)
    assert answers.check(0.5) == 0.5


def test_a_process_that_answered_is_not_silent_however_late_it_is_asked_again(
    answers: Answers,
) -> None:
    assert answers.asks(0.5)
    answers.heard()
    assert answers.check(9.0) == 0.0
    assert answers.asks(9.0)
    assert answers.check(9.5) == 0.5


def test_a_late_check_asks_again_before_it_judges(answers: Answers) -> None:
    answers.check(0.5)
    assert answers.asks(0.5)
    assert answers.check(9.0) == 0.0  # due at 1.0: the process may have stood as long
    assert answers.asks(9.0)
    assert answers.check(9.5) == 0.5


def test_no_secret_reaches_an_agents_process() -> None:
    ours = {
        "HF_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "DIPTYCH_API_KEY": "secret",
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "UCX_LOG_LEVEL": "info",
        "LD_LIBRARY_PATH": "/lib",
        "OMP_NUM_THREADS": "8",
    }
    theirs = environment(ours)
    assert "secret" not in theirs.values()
    assert theirs == {
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "UCX_LOG_LEVEL": "info",
        "LD_LIBRARY_PATH": "/lib",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
