"""Drafts: the tokens that a sequence is likely to go on with, found without the model, and how many of them
pay."""
