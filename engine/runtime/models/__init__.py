"""Architectures: how config.json is read, and the decoders that it names."""
