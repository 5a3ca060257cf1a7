"""Benches of the engine: its scheduler in virtual time, an engine that serves, and its GPU."""
