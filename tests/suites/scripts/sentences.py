"""Vectors by sentence-transformers of texts on the standard input; with `rounds`, how long it takes."""

import json
import sys
import time

import torch
from sentence_transformers import SentenceTransformer

asked = json.load(sys.stdin)
if "threads" in asked:
    torch.set_num_threads(asked["threads"])
model = SentenceTransformer(asked["model"], device="cpu", model_kwargs={"dtype": torch.float32})
texts = asked["texts"]
if "rounds" not in asked:
    print(json.dumps([vector.tolist() for vector in model.encode(texts, batch_size=5)]))
else:
    for size in asked["sizes"]:
        best_s = float("inf")
        for _ in range(asked["rounds"] + 1):
            began_s = time.perf_counter()
            for at in range(0, len(texts), size):
                model.encode(texts[at : at + size], batch_size=size)
            best_s = min(best_s, time.perf_counter() - began_s)
        print(json.dumps([size, len(texts) / best_s]), flush=True)
