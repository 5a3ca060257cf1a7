"""Benches of the gateway, and what its tenants notice of each other: `python -m tests.bench gateway`."""
