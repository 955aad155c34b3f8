"""How completions of uneven length fill an engine, and what is gained by beginning later ones."""

from itertools import islice

import pytest

from open_instruct.planning.turn_trace import LONGEST, SHORTEST, spread_lengths, trace_turns


def count_work(num_each: int, num_ahead: int, num_slots: int) -> float:
    trace = trace_turns(num_each, num_ahead, num_slots)
    return sum(width * length for width, length in trace.durations.items())


def test_lengths_are_spread_evenly_over_all_there_are() -> None:
    lengths = list(islice(spread_lengths(), 1000))
    assert SHORTEST <= min(lengths) < SHORTEST + 0.01
    assert LONGEST - 0.01 < max(lengths) <= LONGEST
    assert sum(lengths[:24]) / 24 == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("num_slots", [8, 48, 256])
@pytest.mark.parametrize("num_ahead", [0, 16, 64])
def test_turn_makes_the_tokens_of_one_step(num_ahead: int, num_slots: int) -> None:
    assert count_work(64, num_ahead, num_slots) == pytest.approx(64, rel=0.02)


def test_single_completions_come_one_after_another() -> None:
    trace = trace_turns(1, 0, 4)
    assert trace.durations == {1: pytest.approx(1.0)}
    assert trace.older_fraction == trace.num_paused == trace.paused_length == 0


def test_on_policy_turn_waits_for_the_longest_with_the_others_idle() -> None:
    trace = trace_turns(24, 0, 64)
    assert sum(trace.durations.values()) == pytest.approx(LONGEST, rel=0.1)
    assert min(trace.durations) == 1
    assert trace.older_fraction == trace.num_paused == 0


@pytest.mark.parametrize("num_slots", [48, 256])
def test_completions_of_the_next_step_make_turns_shorter(num_slots: int) -> None:
    traces = [trace_turns(64, num_ahead, num_slots) for num_ahead in (0, 32, 64)]
    seconds = [sum(trace.durations.values()) for trace in traces]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.7 * seconds[0]
    older = [trace.older_fraction for trace in traces]
    assert older[0] == 0 < older[1] < 1


def test_paused_completions_are_those_that_had_begun() -> None:
    """There is no more of them than room, and together they have made what is older."""
    trace = trace_turns(24, 12, 8)
    assert 0 < trace.num_paused <= 8
    assert trace.paused_length < trace.num_paused * LONGEST
    assert trace.paused_length <= trace.older_fraction * 24 + 1e-6


def test_large_steps_are_followed_by_fewer_completions() -> None:
    small = trace_turns(24, 12, 12)
    large = trace_turns(2400, 1200, 1200)
    assert large.older_fraction == pytest.approx(small.older_fraction)
    assert large.num_paused == pytest.approx(100 * small.num_paused)
    assert list(large.durations) == [100 * width for width in small.durations]
