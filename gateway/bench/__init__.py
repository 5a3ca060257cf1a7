"""Benches of the gateway, and what its tenants notice of each other: `penstock bench gateway`."""
