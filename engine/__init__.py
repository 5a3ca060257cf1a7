"""The engine: owns one model, from HTTP request to sampled token."""
