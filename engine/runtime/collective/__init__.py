"""The parts of a model that one rank of several has, and the sums over all of them."""
