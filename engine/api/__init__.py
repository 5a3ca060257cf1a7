"""The HTTP face of the engine: tokenize, hand to the core, detokenize, stream."""
