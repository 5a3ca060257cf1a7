"""Suites that nobody here wrote, run against the product: `python -m tests.suites NAME`."""
