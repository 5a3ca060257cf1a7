"""Prefix hits, equal pages of two sequences, and sequences that wait for a common prefix."""

from __future__ import annotations

import pytest

from engine.contract.messages import Want
from engine.core.queue.waiting import WaitingQueue
from engine.core.step.planner import PASSED_MAX, Planner
from tests.engine.core.harness import Harness, greedy
from tests.engine.core.test_overlap import Overlapped

PROMPT = list(range(1, 11))


def test_a_page_aligned_prefix_hit_still_computes_the_last_token() -> None:
    h = Harness()
    for handle in (1, 2):
        h.add(handle, PROMPT[:8], greedy(3))
        h.run()
    h.assert_all_as_solo()
    assert h.started[2].cached_len == 7, "the page is not shared, which would leave nothing to compute"
    assert h.plans[3].lengths == [1]


def test_a_prefix_hit_of_all_but_one_token_is_a_single_row() -> None:
    h = Harness()
    for handle in (1, 2):
        h.add(handle, PROMPT[:9], greedy(3))
        h.run()
    h.assert_all_as_solo()
    assert h.started[2].cached_len == 8
    assert (h.plans[3].positions, h.plans[3].lengths, h.plans[3].wants) == ([8], [1], [Want.SAMPLE])
    stats = h.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (18, 8)


def test_output_is_a_prefix_of_the_next_turn() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(8))
    h.run()
    h.add(2, PROMPT + h.tokens[1] + [5, 6], greedy(3))
    h.run()
    assert h.started[2].cached_len == 16  # 10 + 8 tokens, the last of them never computed
    h.assert_all_as_solo()


def test_salts_do_not_share_a_prefix() -> None:
    h = Harness()
    for handle, salt in ((1, b"a"), (2, b"b"), (3, b"a")):
        h.add(handle, PROMPT, greedy(3), cache_salt=salt)
        h.run()
    assert [h.started[handle].cached_len for handle in (1, 2, 3)] == [0, 0, 9]


def test_a_flood_of_prompts_does_not_take_another_tenants_prefix() -> None:
    """Its prompts take all of the cache again and again, and none comes twice. The victim comes again after
    every twenty; with one tenant for both it would find nothing."""
    for flood, full_pages in (("flood", 2), ("victim", 0)):
        h, handle = Harness(pages=48), 0
        cached = set()
        for _ in range(12):
            handle += 1
            h.add(handle, PROMPT, greedy(2), b"victim", tenant="victim")
            h.run()
            if handle > 1:
                cached.add(h.started[handle].cached_len // 4)
            for _ in range(20):
                handle += 1
                h.add(handle, [handle % 250] * 30, greedy(2), flood.encode(), tenant=flood)
                h.run()
        assert min(cached) == full_pages


# -- sessions' pages that are kept -----------------------------------------------------------------

HISTORY = list(range(1, 26))
"""Six pages, and a token that must be computed."""


def found_after(h: Harness, wait_s: float, prompts: int = 20) -> int:
    """A session's turn, whose tool runs for so long while prompts of the same tenant pass through all of the
    cache. The pages that the next turn finds."""
    first = max(h.messages, default=0) + 1
    stops = tuple(range(h.runner.info.vocab_size))  # so that overlapped steps have a late row
    h.add(first, HISTORY, greedy(8, stop_token_ids=stops), has_next_turn=True)
    h.run()
    for handle in range(first + 1, first + 1 + prompts):
        h.now += wait_s / prompts
        h.add(handle, [handle % 250] * 30, greedy(2))
        h.run()
    h.add(first + 1 + prompts, HISTORY, greedy(8, stop_token_ids=stops), has_next_turn=True)
    h.run_as_solo()
    return h.started[first + 1 + prompts].cached_len // 4


@pytest.mark.parametrize("harness", [Harness, Overlapped])
def test_a_sessions_pages_are_kept_while_its_tool_runs(harness: type[Harness]) -> None:
    h = harness(pages=32)
    assert found_after(h, 20.0) == 6
    assert found_after(h, 20.0) == 6, "and for the turn after that"
    stats = h.scheduler.stats()
    assert (stats.kept_found, stats.kept_evicted) == (3 * 6, 0)


def test_nothing_is_kept_beyond_the_deadline_or_where_that_is_off() -> None:
    assert found_after(Harness(pages=32), 40.0) == 0
    h = Harness(pages=32, session_keep_s=0.0)
    assert found_after(h, 1.0) == 0
    assert h.scheduler.stats().pages_kept == 0


def test_an_idle_cache_loses_nothing_at_a_deadline() -> None:
    h = Harness(pages=32)
    assert found_after(h, 10_000.0, prompts=2) == 6
    assert h.scheduler.stats().kept_evicted == 0


def test_kept_pages_hold_up_no_admission() -> None:
    """A tenant keeps all that it may; another one's prompt needs the whole pool, and is computed at once."""
    h = Harness(pages=16)
    for handle in (1, 2):
        h.add(handle, [handle] * 32, greedy(1), has_next_turn=True)
        h.run()
    assert h.scheduler.stats().pages_kept == 8
    h.add(3, [9] * 64, greedy(1), tenant="other")
    h.step()
    assert 3 in h.started
    assert h.scheduler.stats().pages_kept == 0
    assert h.scheduler.stats().kept_evicted == 8
    h.run_as_solo()


def test_a_tenant_that_keeps_all_takes_no_other_ones_prefix() -> None:
    """As the flood above, of which each prompt is a session's. The victim has no session, and finds all."""
    h, cached = Harness(pages=48), set()
    for turn in range(12):
        h.add(turn * 100, PROMPT, greedy(2), b"victim", tenant="victim")
        h.run()
        cached.add(h.started[turn * 100].cached_len // 4 if turn else 2)
        for handle in range(turn * 100 + 1, turn * 100 + 21):
            h.add(handle, [handle % 250] * 30, greedy(2), b"flood", tenant="flood", has_next_turn=True)
            h.run()
            assert h.scheduler.stats().pages_kept <= 24
    assert cached == {2}


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    h = Harness(prefix_cache=False)
    for handle in (1, 2):
        h.add(handle, PROMPT, greedy(3))
    h.run_as_solo()
    assert h.started[2].cached_len == 0
    assert h.scheduler.stats().pages_cached == 0


def test_prompt_logprobs_take_no_prefix_from_the_cache_and_fill_it() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(3))
    h.run()
    h.add(2, PROMPT, greedy(3, prompt_logprobs=2))
    h.run()
    assert h.started[2].cached_len == 0
    h.assert_all_as_solo()


def test_sequences_with_one_prompt_compute_it_once() -> None:
    h = Harness(step_tokens_max=16)
    prompt = [7] * 33
    for handle in (1, 2, 3, 4):
        h.add(handle, prompt, greedy(4, seed=handle))
    h.run_as_solo()
    assert [h.started[handle].cached_len for handle in (1, 2, 3, 4)] == [0, 32, 32, 32]


def test_sequences_that_wait_for_a_common_prefix_are_passed_by_others() -> None:
    h = Harness(step_tokens_max=16)
    h.add(1, [7] * 12, greedy(4))
    h.add(2, [7] * 12, greedy(4))
    h.add(3, [8] * 3, greedy(4))
    plan = h.step()
    assert plan is not None
    assert h.started.keys() == {1, 3}
    h.step()
    assert h.started.keys() == {1, 2, 3}


def test_a_plan_passes_over_a_bounded_number_of_sequences_with_a_common_prefix() -> None:
    h = Harness(slots=20, step_tokens_max=40)
    for handle in range(1, PASSED_MAX + 2):
        h.add(handle, [7] * 33, greedy(2, seed=handle))
    h.add(100, [8] * 33, greedy(2))
    h.step()
    assert h.started.keys() == {1}
    h.step()
    assert len(h.started) == PASSED_MAX + 2
    h.run_as_solo()


def test_no_sequence_waits_for_a_prefix_whose_computation_was_aborted() -> None:
    h = Harness(step_tokens_max=8)
    h.add(1, [7] * 30, greedy(4))
    h.add(2, [7] * 30, greedy(4))
    h.step()
    assert h.started.keys() == {1}
    h.abort(1)
    h.step()
    assert h.started[2].cached_len == 8
    h.run()
    assert h.tokens[2] == h.solo(2).tokens


def test_of_two_equal_pages_one_is_found_and_the_other_is_free_after_its_end() -> None:
    """Two sequences with one prompt have the same output, which fills an equal page of each in the same
    step."""
    h = Harness()
    h.add(1, [1] * 9, greedy(8))
    h.add(2, [1] * 9, greedy(8))
    h.run_as_solo()
    assert h.scheduler.stats().pages_cached == 4


def test_equal_prefixes_computed_in_one_step_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule D, which makes the second wait for the first, is switched off."""
    monkeypatch.setattr(Planner, "_is_coming", lambda *_: False)
    monkeypatch.setattr(WaitingQueue, "is_following", lambda *_: False)
    h = Harness()
    for handle in (1, 2, 3):
        h.add(handle, [1] * 14, greedy(3))
    h.step()
    h.abort(2)
    h.step()
    h.add(4, [1] * 14, greedy(3))
    h.run()
    assert h.tokens[1] == h.tokens[3] == h.tokens[4] == h.solo(1).tokens
    assert h.scheduler.stats().pages_owned == 0
