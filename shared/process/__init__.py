"""A service as a process: settings, life cycle, sockets, TLS, logs, metrics."""
