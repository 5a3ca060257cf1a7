"""Responses that the gateway keeps for callers to refer to: in memory, or in Redis for all gateways."""
