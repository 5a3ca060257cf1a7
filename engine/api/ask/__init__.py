"""From a request's bytes to sequences that the core takes, or to a refusal."""
