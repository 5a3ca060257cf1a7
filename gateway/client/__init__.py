"""The client's end of a request: its body, the answer to it, its deadlines."""
