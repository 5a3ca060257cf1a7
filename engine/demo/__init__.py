"""The built-in demo model: what `penstock up` serves when it is given no other.

**What it is.** A Llama of four layers (hidden 256, 4 heads of 64 over 2 KV heads, feed-forward 704, tied
embeddings, context 2,048): 3,475,712 parameters, 7 MB in bf16, with a byte-level BPE of 2,048 tokens in which
every digit stands alone. `model/` is an ordinary Hugging Face directory.

**What it can talk about.** All of its text is written in this package:

    identity    who and what it is, who made it, how large it is and how it was trained      smalltalk.py
    abilities   what one can ask it                                                          smalltalk.py
    penstock    what Penstock is and does, part by part, and "tell me more"                  concepts.py
    capitals    of 194 countries, some of them under other names; "and Italy?"               facts.py
    countries   which country has a given capital                                            facts.py
    sums        + and - of numbers up to 20, x of numbers up to 10, in digits or words       topics.py
    greetings   hello, how are you, nice to meet you; thanks, goodbyes                       smalltalk.py
    stories     ten short stories by subject, "another one"; a few poems, haiku and jokes    stories.py
    calendar    days, months, seasons, what comes before and after                           knowledge.py
    facts       opposites, colours, animal sounds, planets, the alphabet, counting           knowledge.py
    elsewhere   whatever else: it says that it is only a small demo model                    elsewhere.py

**How it is trained.** `python -m engine.demo.train` writes `model/` from nothing: `corpus` makes 90,000
conversations of one to sixteen turns from a seed, with and without a system prompt, in careless typing too
(`wording`); the loss counts what the assistant says. A second, shorter round (`polish`) brings freer
wordings. `evaluate` then asks in wordings that were held out: 341 of 400 were right after the run that made
these weights (3,441 steps, 0.6 s each on two quiet cores). Of the 117 fresh questions of the tests, 112 were.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
