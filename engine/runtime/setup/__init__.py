"""The runner's settings, and the machine that it finds. No torch here."""
