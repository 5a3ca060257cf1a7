"""Architecture name -> decoder class. A new architecture declares itself here and in `config.FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from engine.runtime.models.config import FAMILIES
from engine.runtime.models.decoder import Decoder

DECODERS: Final[Mapping[str, type[Decoder]]] = {
    "LlamaForCausalLM": Decoder,
    "MinistralForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}
assert DECODERS.keys() == {family.architecture for family in FAMILIES.values()}
