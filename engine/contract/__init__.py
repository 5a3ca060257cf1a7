"""The values that the API process, the core and the runtime agree on. No torch, no sockets."""
