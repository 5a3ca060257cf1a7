from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.trace.request_text import SHOWN_LEN_MAX, printable
from shared.trace.sentences import duration, sentence
from shared.wire import sse
from shared.wire.causes import CAUSES_MAX, CODE_LEN_MAX, COUNT_MAX, Cause, CauseCode, most_telling
from shared.wire.load_report import LoadReport
from shared.wire.shapes import USED_TOKENS_MAX


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (
            Cause(code="waited_pages", ms=1800.0, requests=37, held_percent=98, higher_class=3),
            "queued 1.8 s: no pages (37 sequences hold 98 %), 3 of a higher class went first",
        ),
        (
            Cause(code="waited_pages", ms=1800.0, requests=1, held_percent=98, higher_class=3, first=2),
            "queued 1.8 s: no pages (1 sequence holds 98 %), 3 of a higher class went first, "
            "2 more were taken before it",
        ),
        (
            Cause(code="waited_slots", ms=20.0, requests=8, first=1, shared=True),
            "queued 20 ms: no slot (8 sequences run), 1 other was taken before it "
            "(its own other choices among them)",
        ),
        (
            Cause(code="waited_turn", ms=20.0, prompt_tokens=1920),
            "queued 20 ms: the steps computed 1,920 prompt tokens of others",
        ),
        (Cause(code="waited_turn", ms=20.0), "queued 20 ms: the steps were full"),
        (Cause(code="waited_grammar", ms=120.0), "queued 120 ms: its grammar was being compiled"),
        (Cause(code="waited_step", ms=3.0), "queued 3 ms: a step was being computed"),
        (
            Cause(
                code="prefill", ms=900.0, own_tokens=2000, cached_tokens=64, steps=4, prompt_tokens=8000,
                requests=2, decodes=30,
            ),
            "prefill of 900 ms: 2,000 prompt tokens of its own (64 more were cached) in 4 steps, "
            "beside 8,000 prompt tokens of 2 other requests and 30 streams",
        ),
        (
            Cause(code="prefill", ms=9.0, own_tokens=1, steps=1),
            "prefill of 9 ms: 1 prompt token of its own in 1 step",
        ),
        (
            Cause(code="gap_prompts", ms=310.0, prompt_tokens=1920, requests=1),
            "gap of 310 ms: 1,920 prompt tokens of another request",
        ),
        (
            Cause(code="gap_prompts", ms=310.0, prompt_tokens=1920, requests=2, shared=True),
            "gap of 310 ms: 1,920 prompt tokens of 2 sequences, its own among them",
        ),
        (
            Cause(code="gap_copies", ms=40.0, pages=12),
            "gap of 40 ms: 12 pages of preempted sequences were copied",
        ),
        (Cause(code="gap_host", ms=40.0), "gap of 40 ms: the host was busy between two steps"),
        (
            Cause(code="gap_slow", ms=40.0, decodes=3, expected_ms=4.0),
            "gap of 40 ms: a step of 3 streams that usually takes 4 ms",
        ),
        (Cause(code="gap_decodes", ms=40.0, decodes=250), "gap of 40 ms: a step of 250 streams"),
        (
            Cause(code="preempted_class", ms=1200.0, swapped=True),
            "preempted for 1.2 s: a request of a higher class took its place, "
            "its pages were kept in host memory",
        ),
        (
            Cause(code="preempted_share", ms=1200.0),
            "preempted for 1.2 s: a tenant that held less took its place",
        ),
        (Cause(code="preempted_pages", ms=1200.0), "preempted for 1.2 s: others grew into its pages"),
        (Cause(code="stalled", ms=12_000.0), "stalled 12 s: this client did not read"),
        (Cause(code="tokenizer", ms=2100.0), "tokenizing took 2.1 s"),
        (Cause(code="of_a_later_version", ms=5.0), "5 ms: of_a_later_version"),
    ],
    ids=lambda value: value.code if isinstance(value, Cause) else "",
)  # fmt: skip
def test_a_cause_in_words(cause: Cause, says: str) -> None:
    assert sentence(cause) == says


def test_every_code_has_a_sentence_of_its_own() -> None:
    said = {sentence(Cause(code=code, ms=1.0)) for code in CauseCode}
    assert len(said) == len(CauseCode)
    assert not any(text.endswith(f": {code}") for text in said for code in CauseCode)


def test_a_long_value_is_cut() -> None:
    assert printable("x" * SHOWN_LEN_MAX) == "x" * SHOWN_LEN_MAX
    assert printable("x" * 10_000) == "x" * SHOWN_LEN_MAX + "..."


def test_durations_as_people_write_them() -> None:
    assert [duration(ms) for ms in (0.25, 9.9, 310.4, 999.6, 12_000.0, 59_960.0, 125_000.0)] == [
        *("0.25 ms", "9.9 ms", "310 ms", "1 s", "12 s", "1 min 0 s", "2 min 5 s"),
    ]


def test_the_longest_causes_are_kept_in_their_order() -> None:
    given = [Cause(code="stalled", ms=float(ms)) for ms in (5, 1, 9, 2, 8, 3, 7, 4, 6, 10)]
    kept = most_telling(given)
    assert [cause.ms for cause in kept] == [5, 9, 8, 3, 7, 4, 6, 10]
    assert most_telling(given[:3]) == tuple(given[:3])


def test_the_longest_closing_is_a_comment_that_the_scanner_finds() -> None:
    numbers = {name: COUNT_MAX for name, kind in Cause.__annotations__.items() if kind == "Count"}
    longest_ms = 1e12 - 0.001
    cause = Cause(
        code="x" * CODE_LEN_MAX,
        ms=longest_ms,
        expected_ms=longest_ms,
        swapped=True,
        shared=True,
        **numbers,
    )
    times: dict[str, Any] = dict.fromkeys(
        (f for f in sse.Closing.__struct_fields__ if f.endswith("_ms")), longest_ms
    )
    closing = sse.Closing(
        end_reason="first_token_timeout",
        prompt_tokens=USED_TOKENS_MAX,
        completion_tokens=USED_TOKENS_MAX,
        cached_tokens=USED_TOKENS_MAX,
        host_tokens=USED_TOKENS_MAX,
        disk_tokens=USED_TOKENS_MAX,
        preemptions=USED_TOKENS_MAX,
        causes=(cause,) * CAUSES_MAX,
        **times,
    )
    most = 1 << 40
    load = LoadReport((most, most, most), most, True, most)
    comment = sse.closing_comment(closing, load)
    scanner = sse.TailScanner()
    sent = sse.DONE + comment
    forwarded = b"".join(scanner.feed(sent[at : at + 100]) for at in range(0, len(sent), 100))
    assert (forwarded + scanner.finish(), scanner.closing) == (
        sse.DONE,
        msgspec.structs.replace(closing, load=load),
    )
