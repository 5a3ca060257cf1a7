"""The engine's listener and its handlers."""
