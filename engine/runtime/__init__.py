"""The tensors: models, weights, KV cache, attention, sampling. The only floor with torch."""

import os

# Read by the OpenMP runtime when torch loads it, so it has to be said here, before any module of this
# floor imports torch. By default a thread that waits for its siblings spins; when another process (the
# gateway, the tokenizer) holds the sibling's core, every one of a step's hundred barriers burns a time
# slice. Measured on two busy cores, a 4M model at batch 1: a median step took 13 to 348 ms spinning, and
# 3 to 10 ms sleeping.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
