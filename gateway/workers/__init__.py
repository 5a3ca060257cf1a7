"""Several gateway processes behind one port, and the process that keeps them."""
