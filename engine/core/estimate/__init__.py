"""The time that a step takes, and how much of one prompts may take."""
