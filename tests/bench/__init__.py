"""The shared parts of `python -m tests.bench`, which measures the numbers that README and DESIGN state.

Every bench prints figures of one shape (`figures`), drives its load from a process of its own with a client
that costs a few microseconds an event (`client`), and reads the CPU time of the process under test from the
kernel (`cpu`), so that a busy load generator does not spoil the figure.
"""
