"""When a long wait is reported, by a clock of the test's own, and what the environment variables of waiting take."""

import logging
import math
import re
import threading

import pytest

import sparseallreduce as sar
from sparseallreduce.runtime import stalls


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(stalls, "perf_counter", made)
    monkeypatch.delenv(stalls.STALL_VARIABLE, raising=False)
    monkeypatch.delenv(stalls.TIMEOUT_VARIABLE, raising=False)
    stalls._stall_seconds.cache_clear()
    stalls._default_timeout.cache_clear()
    return made


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "sparseallreduce")
    return lambda: [record.getMessage() for record in caplog.records]


def waited(clock, seconds, **how):
    """Wait for so long, with a look every second; at which seconds there was a warning, and the wait."""
    wait, at, reports = stalls.LongWait(lambda: reports.append(clock.seconds) or ("rank 0 of 2", "a sum: rank 1 is late"), **how), [], []
    begin = clock.seconds
    while clock.seconds < begin + seconds:
        clock.seconds += 1
        wait.check()
    at.extend(each - begin for each in reports)
    return at, wait


def test_a_long_wait_is_reported_after_a_minute_and_at_doubling_intervals(clock, said):
    at, wait = waited(clock, 1000)
    assert at == [60, 120, 240, 480, 960]
    wait.over()
    first, last = said()[0], said()[-1]
    assert re.fullmatch(r"rank 0 of 2 has waited for 60 s, since \d\d:\d\d:\d\d, in a sum: rank 1 is late", first)
    assert last == "rank 0 of 2 went on in a sum after 1000 s"


def test_a_wait_that_is_not_long_says_nothing(clock, said):
    at, wait = waited(clock, 59)
    wait.over()
    assert not at
    assert not said()


def test_a_wait_that_was_not_looked_at_for_long_is_reported_once(clock, said):
    wait = stalls.LongWait(lambda: ("rank 0 of 2", "a sum: rank 1 is late"))
    clock.seconds = 500  # two looks are minutes apart
    for _ in range(5):
        wait.check()
        clock.seconds += 1
    assert len(said()) == 1


def test_time_in_which_a_rank_itself_compiles_kernels_is_not_reported_as_a_wait(clock, said, monkeypatch):
    """Without it, the first sum on a slow machine would blame the other ranks."""
    monkeypatch.setattr(stalls, "compiling_seconds", lambda: min(clock.seconds, 50))
    assert waited(clock, 200)[0] == [110, 170]


@pytest.mark.parametrize(("text", "expected"), [("5", [5, 10, 20, 40, 80]), ("0", []), ("", [60]), (" 30.0 ", [30, 60])])
def test_the_variable_says_when(clock, said, monkeypatch, text, expected):
    monkeypatch.setenv(stalls.STALL_VARIABLE, text)
    assert waited(clock, 100)[0] == expected


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "1 minute"])
def test_a_bad_value_is_reported_once_and_ignored(clock, said, monkeypatch, text):
    monkeypatch.setenv(stalls.STALL_VARIABLE, text)
    monkeypatch.setenv(stalls.TIMEOUT_VARIABLE, text)
    assert waited(clock, 100)[0] == waited(clock, 100)[0] == [60]
    assert stalls.default_timeout() is stalls.default_timeout() is None
    about = [each for each in said() if "must be" in each]
    assert len(about) == 2
    assert all(repr(text) in each for each in about)
    assert stalls.STALL_VARIABLE in about[0]
    assert stalls.TIMEOUT_VARIABLE in about[1]


def test_no_timeout_of_zero_seconds(clock, said, monkeypatch):
    monkeypatch.setenv(stalls.TIMEOUT_VARIABLE, "0")
    assert stalls.default_timeout() is None
    assert "positive" in said()[0]


def test_a_limited_wait_ends_with_the_default_timeout(clock, monkeypatch):
    monkeypatch.setenv(stalls.TIMEOUT_VARIABLE, "7")
    with pytest.raises(sar.WaitTimeoutError, match=r"not done within 7 s: a sum: rank 1 is late"):
        waited(clock, 100, limited=True)
    assert clock.seconds == 8
    assert waited(clock, 50)[0] == []  # one that is not


def test_what_the_user_has_called_is_named_with_its_hint(clock, said):
    @stalls.collective("score")
    def score():
        with stalls.activity("something inside"):
            return waited(clock, 60)[0]

    assert score() == score() == [60]  # the decorator serves any number of calls
    hint = "score is collective: every rank of the communicator must call it; predict is local"
    assert all(text.endswith(f"in score, in a sum: rank 1 is late. {hint}") for text in said())
    waited(clock, 60)
    assert "score" not in said()[-1]


def test_a_warning_fails_no_wait(clock, said):
    def broken():
        raise RuntimeError("MPI has been finalised")

    wait = stalls.LongWait(broken)
    clock.seconds += 61
    wait.check()
    assert "in a call of the library" in said()[0]

    class Full(logging.Handler):
        def emit(self, record):
            raise OSError("no space left on the device")

    handler = Full()
    logging.getLogger("sparseallreduce").addHandler(handler)
    try:
        clock.seconds += 100
        wait.check()
    finally:
        logging.getLogger("sparseallreduce").removeHandler(handler)


def test_a_call_that_blocks_is_reported_by_a_thread(monkeypatch, caplog):
    monkeypatch.setattr(stalls, "_CHECK_SECONDS", 0.005)
    monkeypatch.setenv(stalls.STALL_VARIABLE, "0.01")
    monkeypatch.setattr(stalls, "_watch", stalls._Watch())
    caplog.set_level(logging.INFO, "sparseallreduce")
    reported = threading.Event()

    class Listening(logging.Handler):
        def emit(self, record):
            reported.set()

    handler = Listening()
    logging.getLogger("sparseallreduce").addHandler(handler)
    try:
        with stalls.activity("fit"), stalls.blocked(1, 3, "a sum inside MPI"):
            assert reported.wait(20)  # as a call of MPI's would
    finally:
        logging.getLogger("sparseallreduce").removeHandler(handler)
    texts = [record.getMessage() for record in caplog.records]
    assert re.match(r"rank 1 of 3 has waited for .* s, since .*, in fit, in a sum inside MPI", texts[0])
    assert texts[-1].startswith("rank 1 of 3 went on in fit after")
    assert not stalls._watch.waits
    assert stalls.stall_seconds() == 0.01
    assert math.isfinite(stalls.stall_seconds())
