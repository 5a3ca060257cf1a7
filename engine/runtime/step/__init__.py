"""The tensors of a step, whatever device computes it: rows, seats, pages and results."""
