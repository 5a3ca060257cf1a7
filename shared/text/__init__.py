"""Text and tokens: tokenizers, chat templates, and the files of a model that tell of both."""
