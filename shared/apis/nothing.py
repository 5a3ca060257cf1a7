"""The fields of several APIs that ask for what no engine of ours can do, with the values that ask for
nothing. A field of one API alone is in the module of that API.

Of some fields our engines do a part. They are `LOOKED_INTO`: their requests say what is not done of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shared.wire.errors import UnsupportedParameter

Nothing = tuple[object, ...]
"""The values of a field that ask for nothing. Null is always one of them."""

FALSE: Final[Nothing] = (False,)
NONE: Final[Nothing] = ()
EMPTY: Final[Nothing] = ("", [], {})
LOOKED_INTO: Final[Nothing] = (None,)
"""The mark of a field that `Request.check_for_ours` looks into."""

PROMPT: Final[Mapping[str, Nothing]] = {
    **dict.fromkeys(("chat_template", "documents", "mm_processor_kwargs"), EMPTY),
    "functions": ([],),
    **dict.fromkeys(("truncate", "truncate_prompt_tokens"), NONE),
    **dict.fromkeys(("thinking", "enable_thinking", "reasoning"), NONE),
}
"""Fields that change what the prompt's tokens are."""
EXTENSIONS: Final[Mapping[str, Nothing]] = {
    **PROMPT,
    **dict.fromkeys(("response_format", "structured_outputs"), LOOKED_INTO),
    **dict.fromkeys(("guided_json", "json_schema"), ("",)),  # {} is a schema: any JSON
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar"), EMPTY),
    **dict.fromkeys(("guided_whitespace_pattern", "guided_decoding_backend"), EMPTY),
    **dict.fromkeys(("regex", "ebnf", "grammar"), EMPTY),
    **dict.fromkeys(("bad_words", "bad_words_ids", "allowed_token_ids", "logits_processors"), EMPTY),
    **dict.fromkeys(("vllm_xargs", "custom_params", "custom_logit_processor", "lora_path"), EMPTY),
    **dict.fromkeys(("lora", "adapter_id", "prompt_embeds", "repetition_detection"), EMPTY),
    **dict.fromkeys(("lora_request", "banned_tokens", "negative_prompt"), EMPTY),
    **dict.fromkeys(("input_ids", "prompt_token_ids"), EMPTY),
    **dict.fromkeys(("stop_regex", "stop_sequences", "structural_tag", "logprob_token_ids"), EMPTY),
    "function_call": ("none", "auto"),
    "return_tokens_as_token_ids": FALSE,
    "n_predict": (-1,),
    "separate_reasoning": (True,),
    "top_n_sigma": (0, -1),
    "guidance_scale": (1,),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "early_stopping"), FALSE),
    **dict.fromkeys(("no_stop_trim", "watermark"), FALSE),
    "do_sample": (True,),
    **dict.fromkeys(("max_new_tokens", "random_seed"), NONE),
    **dict.fromkeys(("min_new_tokens", "penalty_alpha"), (0,)),
    "num_beams": (1,),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("prompt_logprobs", "web_search_options"), NONE),
    **dict.fromkeys(("length_penalty", "repeat_penalty", "typical_p", "tfs_z", "top_a"), (1,)),
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "no_repeat_ngram_size"), (0,)),
}

CHAT: Final[Mapping[str, Nothing]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "chat_template_kwargs": EMPTY,
    "thinking_token_budget": (-1,),
    "include_reasoning": NONE,
    "continue_final_message": FALSE,
}
"""Fields of chats, where there is no chat."""

INSTEAD: Final[Mapping[str, str]] = {
    "do_sample": "temperature 0",
    "ebnf": "structured_outputs.grammar",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "json_schema": "response_format",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "random_seed": "seed",
    "reasoning": "reasoning_effort",
    "regex": "structured_outputs.regex",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
"""The fields of chats and completions to use in place of fields that are refused, by these."""


def unsupported(param: str, instead: str | None = None) -> UnsupportedParameter:
    """The error of a field that asks for what no engine of ours does. `instead` is what does it."""
    if instead is not None:
        return UnsupportedParameter(f"{param} is not supported; use {instead}.", param=param)
    return UnsupportedParameter(f"{param}: this server cannot do what it asks for.", param=param)
