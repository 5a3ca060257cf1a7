"""The stages of a request and its spans."""
