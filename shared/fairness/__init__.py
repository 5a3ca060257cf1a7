"""Shares room, threads and turns of an event loop among tenants."""
