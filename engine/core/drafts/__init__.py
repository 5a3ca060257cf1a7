"""Drafts: the tokens that a sequence is likely to go on with, found without the model, and how many of them
pay.

*Why no draft model.* A smaller model of the same tokenizer could guess, too, and an operator might want to
name one. It does not fit `engine.core.drafts.drafter.Drafts`, and is not offered, for these reasons:

1. A look is the core's own work, between two steps: a few microseconds, from tokens that the core has. A
   model's guess is k forward passes, one behind the other, where the weights are. The core would wait for
   them before it knows the lengths of its plan; so they would have to be steps of their own, which are
   planned, launched and paid for by the gap targets like any other.
2. A draft model has keys and values of its own for every sequence: pages that are taken, preempted, restored,
   shared and evicted beside those of the model. All of that is there once (`engine.core.step.allocator`), for
   one geometry, and the admission of a sequence would have to ask both.
3. What is right of its drafts here is less than elsewhere. Verifying samples by (seed, position) and keeps a
   draft that is equal, so that tokens are the same with drafts and without. A guess that is found, or forced,
   loses nothing by that, as it has no probabilities. A model's does: where rejection sampling would keep 0.81
   of its tokens, the same draw keeps 0.74 if the draft model draws by the same number, and 0.67 if it takes
   the likeliest.
4. On a CPU, where steps are bound by reading weights, a model of a tenth of the size takes a tenth of a step
   for each draft before anything is verified: four drafts of which 0.7 are right bring 2.8 tokens for 1.4
   steps and the verifying. What stands in the prompt costs nothing of that, and is what agents' answers are
   made of.

What a model can guess beside its own step is another matter: layers that the checkpoint brings for it (MTP)
have their pages in the same geometry, and run within the same step.
"""
