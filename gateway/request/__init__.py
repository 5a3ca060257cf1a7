"""The way of one request, from its head to its completed line."""
