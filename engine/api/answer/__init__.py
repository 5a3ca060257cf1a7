"""Answers as bytes: an encoder for each API, and what all of them share."""
