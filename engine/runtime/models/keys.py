"""The meaning of the keys of config.json that no family reads by itself, as a table in the form that
`shared.text.model_files` describes. A family's own keys are its fields (`engine.runtime.models.dense`).

Keys of `Only` are read by code that all architectures of transformers share, so that they change what any
model computes. Settings of generation are for the API process, which reads them here where the model has no
generation_config.json. `auto_map` names code that is never run: it is in no table, so the log names it.
"""

from __future__ import annotations

from typing import Final

from engine.contract.generation_keys import GENERATION_KEYS
from shared.text.model_files import NO_EFFECT, USED, KeyMeanings, only

_READ: Final = ("architectures", "model_type", "is_matryoshka", "matryoshka_dimensions")
_OF_TRAINING: Final = (
    "attention_dropout",
    "embd_pdrop",
    "gradient_checkpointing",
    "initializer_range",
    "pretraining_tp",
    "resid_pdrop",
    "residual_dropout",
    "use_cache",
)
_OF_TOKENS: Final = (
    "bos_token_id",
    "decoder_start_token_id",
    "pad_token_id",
    "sep_token_id",
    "tokenizer_class",
)
_OF_OTHER_TASKS: Final = (
    "add_cross_attention",
    "cross_attention_hidden_size",
    "finetuning_task",
    "id2label",
    "is_decoder",
    "label2id",
    "num_labels",
    "prefix",
    "problem_type",
    "task_specific_params",
    "tie_encoder_decoder",
)
_OF_THE_LIBRARY: Final = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",  # --dtype chooses it here
    "experts_implementation",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pruned_heads",
    "return_dict",
    "tf_legacy_loss",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_bfloat16",
)
COMMON_KEYS: Final[KeyMeanings] = {
    **dict.fromkeys((*GENERATION_KEYS, *_READ), USED),
    **dict.fromkeys((*_OF_TRAINING, *_OF_TOKENS, *_OF_OTHER_TASKS, *_OF_THE_LIBRARY), NO_EFFECT),
    "attention_chunk_size": only(None),
    "attribute_map": only(None, {}),  # names that stand for others
    "compression_config": only(None),  # an older name of quantization_config
    "configuration_files": only(None),  # another file instead of this one
    "decoder": only(None),
    "fusion_config": only(None, {}),
    "generator": only(None),
    "is_causal": only(True),
    "is_encoder_decoder": only(None, False),
    "kv_sharing_modes": only(None),
    "per_layer_config": only(None, {}),
    "text_config": only(None),
    "text_encoder": only(None),
    "transformers_weights": only(None),  # another file instead of model.safetensors
}
WHOLE_KEYS: Final[KeyMeanings] = {
    **COMMON_KEYS,
    **dict.fromkeys(("text_config", "tie_word_embeddings"), USED),
    **dict.fromkeys(("image_token_id", "video_token_id"), NO_EFFECT),
    **dict.fromkeys(("vision_start_token_id", "vision_end_token_id", "language_model_only"), NO_EFFECT),
}
"""The meanings of keys beside `text_config`, for a model of more than text. `vision_config` is in no table,
so the log says that it is not read: images are not served."""
