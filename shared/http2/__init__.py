"""The hop: HTTP/2 between gateway and engine. `connection.py` has the theory."""
