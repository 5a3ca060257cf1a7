"""The built-in demo model: what `penstock up` serves when it is given no other.

`model/` is an ordinary Hugging Face directory with a Llama of four layers (hidden 256, 4 heads of 64 over 2
KV heads, feed-forward 704, tied embeddings, context 2,048): 3,475,712 parameters, 7 MB in bf16, with a
byte-level BPE of 2,048 tokens in which every digit stands alone.

The text that it was trained on, and the training itself, are in `engine/demo/train` and are not installed
with the product. `python -m engine.demo.train`, from the root of the repository, makes `model/` again.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
