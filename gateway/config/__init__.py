"""The settings that the gateway declares, a module for each kind, and the whole that they make."""
