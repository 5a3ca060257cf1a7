"""The weights of a model, from its files to tensors."""
