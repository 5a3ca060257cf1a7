"""The public edge: identity, limits, routing and the relay."""
