"""The description of the public API."""
