"""The directory: the tenants and keys that operators change while gateways run, in the file or in Redis."""
