"""To the engine and back: bytes through, under deadlines."""
