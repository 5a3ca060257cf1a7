"""The tensors: models, weights, KV cache, attention, sampling. The only floor with torch."""
