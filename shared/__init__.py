"""The code that gateway and engine share. It imports neither of them, nor torch, nor aiohttp."""
