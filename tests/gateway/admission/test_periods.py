"""Calendar days and months by whole-number arithmetic, against the standard library's calendar."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import quota
from gateway.admission.quota import DAY_MS, day_end_ms, day_of, month_end_ms, month_of
from tests.gateway.redis_server import RedisServer

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LUA: Final = (Path(quota.__file__).parent / "quota.lua").read_text()
MOMENTS: Final = st.integers(0, 4_102_444_800_000)  # until 2100


def at(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


@given(MOMENTS)
def test_a_period_ends_where_the_calendar_says(ms: int) -> None:
    moment = at(ms)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    assert at(day_end_ms(ms)) == midnight + timedelta(days=1)
    assert at(month_end_ms(ms)) == (midnight.replace(day=1) + timedelta(days=31)).replace(day=1)


def test_days_and_months_are_counted_without_a_gap_or_a_repetition() -> None:
    """Every day from 1970 to 2105, over leap years and 2100, which is none."""
    month = month_of(0)
    for day in range(1, 49_500):
        ms = day * DAY_MS
        month += at(ms).day == 1
        assert (day_of(ms), day_of(ms - 1), month_of(ms)) == (day, day - 1, month)


def test_redis_counts_the_same_months(redis: RedisServer) -> None:
    begin, end = LUA.index("local function day_of"), LUA.index("local function parse")
    script = f"local DAY_MS = 86400000\n{LUA[begin:end]}\nlocal found = {{}}\n" + (
        "for day = 0, 49499 do found[#found + 1] = month_of(day * DAY_MS + 5) end return found"
    )
    assert redis.admin.eval(script, 0) == [month_of(day * DAY_MS) for day in range(49_500)]
