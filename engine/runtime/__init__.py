"""The tensors: models, weights, KV cache, attention, sampling. The only floor with torch."""

import os

# The OpenMP runtime reads this when torch loads it, so it is set here, before any module of this package
# imports torch. By default a thread that waits for the others spins; when another process (the gateway, the
# tokenizer) holds another thread's core, every one of a step's hundred barriers burns a time slice. Measured
# on two busy cores, a 4M model at batch 1: a median step took 13 to 348 ms spinning, and 3 to 10 sleeping.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
