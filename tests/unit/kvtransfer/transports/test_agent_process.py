"""What an agent's process knows of its worker's environment, and when it counts as silent."""

import os
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvtransfer.agents.wire import Message
from kvtransfer.transports import agent_process
from kvtransfer.transports.agent_process import AgentProcess, Answers, environment


class Thread:
    """What is watched, called when the test says so."""

    def __init__(self) -> None:
        self.watched: dict[int | socket.socket, Callable[[], object]] = {}

    def watch(self, file: int | socket.socket, events: int, callback: Callable[[], object]) -> None:
        self.watched[file] = callback

    def unwatch(self, file: int | socket.socket) -> None:
        del self.watched[file]

    def later(self, delay_s: float, job: Callable[[], None]) -> None: ...


class FalsePool:
    """Of no use to whoever ends at once."""

    fd = 0


class Owner:
    """Hears of the end."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def on_message(self, message: Message) -> None: ...

    def on_end(self, why: str) -> None:
        self.ends.append(why)


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


def test_one_that_had_died_before_it_is_closed_is_told_of_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_process, "_command", lambda *asked: ["/bin/false"])
    thread, owner, pool = Thread(), Owner(), cast(Any, FalsePool())
    process = AgentProcess("nixl", cast(Any, None), pool, owner, cast(Any, thread), 1.0)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    (broken,) = (call for file, call in thread.watched.items() if isinstance(file, socket.socket))
    broken()  # before the system's word
    assert owner.ends == []
    process.close()
    process.close()
    assert len(owner.ends) == 1
    assert thread.watched == {}


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
