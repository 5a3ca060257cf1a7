"""Grammars that answers follow: compiled, matched and turned into masks on threads beside the steps."""
