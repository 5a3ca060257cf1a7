"""Vectors by sentence-transformers: each line of the standard input asks for something, and has a line of
answer.

`model` loads one, `texts` asks for their vectors, `batches` for the seconds that it takes to make those of
some texts at once, then of others."""

import json
import sys
import time

import torch
from sentence_transformers import SentenceTransformer

model = None
for line in sys.stdin:
    asked = json.loads(line)
    told = None
    if "threads" in asked:
        torch.set_num_threads(asked["threads"])
    if "model" in asked:
        model = SentenceTransformer(asked["model"], device="cpu", model_kwargs={"dtype": torch.float32})
    if "texts" in asked:
        told = [vector.tolist() for vector in model.encode(asked["texts"], batch_size=5)]
    if "batches" in asked:
        began_s = time.perf_counter()
        for batch in asked["batches"]:
            model.encode(batch, batch_size=len(batch))
        told = time.perf_counter() - began_s
    print(json.dumps(told), flush=True)
