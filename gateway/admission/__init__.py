"""What a request asks for, what it weighs, and whether its caller's quotas allow it."""
