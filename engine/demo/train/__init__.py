"""The demo model's training: its text, its network and its evaluation. Serving the model needs none of it.

    python -m engine.demo.train       writes `engine/demo/model` from nothing, in about 35 minutes

All of the text is written in this package:

    identity    what the model is, its author, its size and its training                     smalltalk.py
    abilities   what one can ask it                                                          smalltalk.py
    penstock    what Penstock is and does, part by part, and "tell me more"                  concepts.py
    capitals    of 194 countries, some of them under other names; "and Italy?"               facts.py
    countries   which country has a given capital                                            facts.py
    sums        + and - of numbers up to 20, x of numbers up to 10, in digits or words       topics.py
    greetings   hello, how are you, nice to meet you; thanks, goodbyes                       smalltalk.py
    stories     ten short stories by subject, "another one"; a few poems, haiku and jokes    stories.py
    calendar    days, months, seasons, what comes before and after                           knowledge.py
    facts       opposites, colours, animal sounds, planets, the alphabet, counting           knowledge.py
    elsewhere   anything else: it says that it is only a small demo model                    elsewhere.py

`corpus` makes 90,000 conversations of one to sixteen turns from a seed, with and without a system prompt, in
careless typing too (`wording`); the loss counts what the assistant says. A second, shorter round (`polish`)
brings freer wordings, a third (`calls`) is of functions and of JSON, and a short fourth brings back what that
has unsettled. `evaluate` then asks in wordings that were held out: of 400 some 332 are right, and of the 117
fresh questions of `tests/engine/demo/questions.py` 112. The present weights took 3,441 steps for two rounds
(0.6 s each on two quiet cores with bf16) and 1,292 for the others (1.8 s each on one core without). Of calls
that are asked for in held-out words 53 of 61 have their form; the names in them are often wrong, as so small
a model hardly copies: a grammar writes the names of functions and parameters.
"""
