"""The start of a runner, whatever computes: load, size, build, warm up, time."""
