"""The listeners: sockets, TLS, and the framing of what clients send."""
