"""The meaning of each key of generation_config.json, in a table as `shared.text.model_files` describes it.

A key that would change every answer, in a way that a request cannot undo, is not dropped: a model that sets
it is refused. Keys that a request always decides (how many tokens, how many choices), and those that change
how fast an answer comes, have no effect.
"""

from __future__ import annotations

from typing import Final

from shared.text.model_files import NO_EFFECT, USED, KeyMeanings, only

_READ: Final = (
    "do_sample",
    "eos_token_id",
    "min_p",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
_DECIDED_BY_REQUESTS: Final = (
    "max_length",
    "max_new_tokens",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "return_dict_in_generate",
)
_OF_BEAMS: Final = ("early_stopping", "length_penalty")  # without effect, as `num_beams` must be 1
_OF_TOKENS: Final = ("bos_token_id", "decoder_start_token_id", "pad_token_id")
_OF_SPEED: Final = (
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "cache_config",
    "compile_config",
    "continuous_batching_config",
    "disable_compile",
    "is_assistant",
    "low_memory",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "target_lookbehind",
    "use_cache",
    "use_mtp",
)
_OF_THE_LIBRARY: Final = (
    "_commit_hash",
    "_from_model_config",
    "remove_invalid_values",  # an answer with such values is an error here
    "renormalize_logits",  # a softmax follows, which normalizes
    "transformers_version",
)
GENERATION_KEYS: Final[KeyMeanings] = {
    **dict.fromkeys(_READ, USED),
    **dict.fromkeys(
        (*_DECIDED_BY_REQUESTS, *_OF_BEAMS, *_OF_TOKENS, *_OF_SPEED, *_OF_THE_LIBRARY), NO_EFFECT
    ),
    "assistant_ensemble_weight": only(None),
    "bad_words_ids": only(None),
    "begin_suppress_tokens": only(None, []),
    "cache_implementation": only(None, "dynamic", "static", "offloaded", "offloaded_static", "hybrid"),
    "constraints": only(None),
    "diversity_penalty": only(None, 0),
    "dola_layers": only(None),
    "encoder_no_repeat_ngram_size": only(None, 0),
    "encoder_repetition_penalty": only(None, 1),
    "epsilon_cutoff": only(None, 0),
    "eta_cutoff": only(None, 0),
    "exponential_decay_length_penalty": only(None),
    "force_words_ids": only(None),
    "forced_bos_token_id": only(None),
    "forced_eos_token_id": only(None),
    "guidance_scale": only(None, 1),
    "max_time": only(None),
    "min_length": only(None, 0),
    "min_new_tokens": only(None, 0),
    "no_repeat_ngram_size": only(None, 0),
    "num_beam_groups": only(None, 1),
    "num_beams": only(None, 1),
    "penalty_alpha": only(None, 0),
    "sequence_bias": only(None),
    "speculation_type": only(None),
    "stop_strings": only(None, []),
    "suppress_tokens": only(None, []),
    "token_healing": only(None, False),
    "top_h": only(None),
    "typical_p": only(None, 1),
    "watermarking_config": only(None),
}
