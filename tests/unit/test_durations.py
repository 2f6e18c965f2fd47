"""Durations as users write them."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.durations import MAX_SECONDS, format_duration, parse_duration
from relight.errors import ConfigError, DurationError


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30s", 30),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("3d", 259_200),
        ("250ms", 0.25),
        ("2w", 1_209_600),
        ("1w2d3h4m5s6ms", 788_645.006),
        ("1h 30m", 5400),
        (" 30 s ", 30),
        ("0s", 0),
        ("0.1s", 0.1),
        ("100ms", 0.1),
        ("90", 90),
        ("0.5", 0.5),
        (0, 0),
        (7, 7),
        (1.5, 1.5),
        (timedelta(minutes=2), 120),
        (timedelta(milliseconds=1), 0.001),
        (MAX_SECONDS, MAX_SECONDS),
        ("36525d", MAX_SECONDS),
    ],
)
def test_accepted(value, seconds):
    parsed = parse_duration(value, "sleep()")
    assert parsed == seconds
    assert type(parsed) is float


@pytest.mark.parametrize(
    "value",
    [
        "3 bananas",
        "",
        "   ",
        "s",
        "-5s",
        "+5s",
        "1s1s",
        "30m1h",
        "5M",
        "1,5h",
        "1e3s",
        ".5s",
        "1.s",
        "5sec",
        "5 m s",
        "inf",
        "nan",
        "٣s",  # a digit for str.isdigit(), but not here
        "1h\x00",
        "36526d",
        "9" * 10_000 + "s",
        "9" * 90,
        -1,
        -0.001,
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        MAX_SECONDS + 1,
        True,
        False,
        None,
        b"30s",
        ["30s"],
        timedelta(seconds=-1),
        timedelta.max,
    ],
)
def test_refused_with_a_message_that_helps(value: Any):
    with pytest.raises(DurationError) as caught:
        parse_duration(value, "step 'charge': timeout")
    message = str(caught.value)
    assert message.startswith("step 'charge': timeout: ")
    assert repr(value)[:100] in message
    assert '"30s"' in message
    assert '"1h30m"' in message
    assert len(message) < 500, "a huge value must not become a huge message"
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0s"),
        (0.25, "250ms"),
        (0.0004, "0s"),
        (0.0006, "1ms"),
        (0.9999, "1s"),
        (1, "1s"),
        (1.5, "1s500ms"),
        (90, "1m30s"),
        (3600, "1h"),
        (90_061, "1d1h1m1s"),
        (2_592_000, "30d"),
        (-3, "-3s"),
        (-0.0001, "0s"),
    ],
)
def test_written(seconds, written):
    assert format_duration(seconds) == written


@given(st.floats(min_value=0, max_value=MAX_SECONDS))
def test_what_is_written_reads_back_to_the_millisecond(seconds):
    assert parse_duration(format_duration(seconds), "x") == pytest.approx(seconds, abs=0.000_51, rel=1e-15)


@given(st.text(max_size=20) | st.from_regex(r"[0-9.]{1,5} ?(w|d|h|m|s|ms|x)[0-9a-z. ]{0,8}", fullmatch=True))
def test_any_text_is_a_duration_in_range_or_a_duration_error(text):
    try:
        seconds = parse_duration(text, "x")
    except DurationError:
        return
    assert 0 <= seconds <= MAX_SECONDS
