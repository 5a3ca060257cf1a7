"""Admission: the sequences that wait, and the order in which they are admitted."""
