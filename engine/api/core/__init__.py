"""The API process's side of the core."""
