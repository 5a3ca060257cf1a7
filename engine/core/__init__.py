"""The decisions: scheduler, pages, loop. Works on ints; no torch on this floor."""
