"""What gateway and engine must agree on. Imports neither of them, nor torch, nor aiohttp."""
