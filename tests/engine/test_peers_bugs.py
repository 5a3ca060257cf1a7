"""Bugs that other engines had, and the tests that would catch them here.

Each was reported against vLLM, SGLang, Mini-SGLang or nano-vllm. The table names its tests so that none of
them can be renamed or removed unnoticed.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ENGINE = Path(__file__).parent

CAUGHT_BY = {
    "late output after a preemption or an end (vllm#47900, #38624, #28787)": (
        "core/test_simulation.py::test_laws_hold_in_random_worlds",
        "core/test_overlap.py::test_a_stop_token_leaves_one_late_row_whose_result_is_dropped",
        "core/test_overlap.py::test_no_running_sequence_is_preempted_while_a_step_is_in_flight",
        "core/test_abort.py::test_late_output_of_an_aborted_sequence_is_dropped",
    ),
    "over-admission thrashes (vllm#37307, #44594)": (
        "core/test_simulation.py::test_over_admission_does_not_thrash",
        "core/test_preemption.py::test_preemptions_of_one_sequence_are_bounded",
        "core/test_overlap.py::test_overlapped_steps_preempt_no_more_than_plain_ones_in_a_tight_pool",
    ),
    "everybody is preempted for pages that are not free yet (vllm-ascend#16315)": (
        "core/test_victims.py::test_victims_are_as_few_as_are_enough_the_most_expendable_first",
        "core/test_preemption.py::test_none_is_preempted_for_a_sequence_that_would_not_fit_all_the_same",
        "core/test_overlap.py::test_pages_of_an_ended_sequence_are_not_free_before_its_late_row_is_committed",
    ),
    "a full hit leaves nothing to compute, hits change after budgeting (nano-vllm#144, #211, #233)": (
        "core/test_prefix_cache.py::test_a_page_aligned_prefix_hit_still_computes_the_last_token",
        "core/test_preemption.py::test_a_preempted_sequence_finds_its_own_prefix_again",
        "core/test_overlap.py::test_a_resubmitted_prompt_that_ends_on_a_page_leaves_a_token_to_compute",
    ),
    "a sequence larger than the cache stops the engine (nano-vllm)": (
        "core/test_scheduler.py::test_a_sequence_that_can_never_run_is_rejected_at_once",
        "core/test_scheduler.py::test_a_sequence_that_fills_the_pool_exactly_runs",
    ),
    "an abort frees twice, or leaks, or leaves a client hanging (mini-sglang)": (
        "core/test_abort.py::test_abort_cancels_after_any_number_of_steps_and_frees_everything_at_once",
        "core/test_overlap.py::test_abort_cancels_a_sequence_at_any_stage",
        "api/test_endings.py::test_the_client_leaves",
        "core/test_scheduler.py::test_a_sequence_longer_than_the_context_is_rejected",
    ),
    "an abort of req-1 hits req-10 (sglang)": (
        "api/test_endings.py::test_abort_by_exact_id",
        "core/test_abort.py::test_abort_cancels_the_exact_handle_alone",
    ),
    "an abort misses children, or comes in the final step (vllm#14326, #29987)": (
        "api/test_endings.py::test_abort_by_exact_id",
        "core/test_abort.py::test_abort_in_the_final_step_ends_a_sequence_once",
        "core/test_overlap.py::test_abort_cancels_one_of_several_choices_in_its_final_step",
    ),
    "planning overwrites what a step in flight reads (sglang#26380, #38140)": (
        "core/test_overlap.py::test_a_slot_is_not_handed_on_before_the_late_row_is_committed",
        "core/test_overlap.py::test_a_page_is_found_by_others_only_when_its_tokens_are_known",
        "core/test_simulation.py::test_laws_hold_in_random_worlds",
    ),
    "a page that was not written is read (vllm#40047, #37442, #43810, #57156)": (
        "runtime/host/test_attention.py::test_where_the_pages_lie_changes_nothing",
        "runtime/host/test_runner.py::test_warm_up_leaves_nothing_behind",
        "runtime/host/test_runner.py::test_numeric_failure_ends_its_row_alone",
    ),
    "ranks that decide by their own clocks deadlock (sglang#27221, vllm#48720)": (),
    "a stop string across tokens (vllm#36830, #45636)": (
        "api/test_detokenizer.py::test_every_stop_string_at_every_position",
        "api/test_detokenizer.py::test_the_cut_does_not_depend_on_the_tokens",
    ),
    "half a character at the prompt's end or the answer's (vllm#48853, #17448)": (
        "api/test_detokenizer.py::test_the_prompt_may_end_anywhere",
        "api/test_detokenizer.py::test_ending_after_any_token_gives_whole_characters_of_the_text",
        "api/test_detokenizer.py::test_bytes_that_are_no_character_do_not_hold_text_for_ever",
    ),
    "equal hashes of different prefixes (vllm#12621)": (
        "core/test_block_manager.py::test_a_pages_identity_depends_on_every_token_before_it",
        "core/test_block_manager.py::test_token_ids_do_not_run_into_each_other",
        "core/test_block_manager.py::test_salts_separate_equal_prompts",
    ),
    "preempted work goes behind newcomers (vllm#41951)": (
        "core/test_preemption.py::test_a_preempted_sequence_is_admitted_before_newcomers",
        "core/test_policy.py::test_a_preempted_sequence_ranks_before_newcomers_of_its_class_and_not_of_a_higher_one",
        "core/test_turns.py::test_the_oldest_sequence_has_its_turn_and_never_starves",
        "core/test_simulation.py::test_laws_hold_in_random_worlds",
    ),
    "a token depends on who shares the batch (vllm#5898)": (
        "runtime/host/test_sampler.py::test_a_token_does_not_depend_on_who_shares_the_batch",
        "runtime/host/test_runner.py::test_random_tokens_are_the_same_alone_and_in_company",
        "test_whole_core.py::test_a_seeded_draw_does_not_depend_on_company",
    ),
}
OPEN = {"ranks that decide by their own clocks deadlock (sglang#27221, vllm#48720)"}
"""One rank is all there is yet."""


@cache
def functions_of(module: Path) -> frozenset[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(n.name for n in ast.parse(module.read_text()).body if isinstance(n, functions))


@pytest.mark.parametrize("bug", CAUGHT_BY)
def test_each_bug_has_tests_that_exist(bug: str) -> None:
    for node in CAUGHT_BY[bug]:
        module, name = node.split("::")
        assert name in functions_of(ENGINE / module), node
    assert bool(CAUGHT_BY[bug]) != (bug in OPEN)
