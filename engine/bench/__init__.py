"""Benches that need the engine's own parts: `penstock bench scheduler`."""
