"""Random histories of requests, through the real gateway and real engines, in virtual time.

draw.py      a seed becomes a world: its services, its callers, how each of them ends, what breaks
virtual.py   the event loop: time passes when no task can run, connections are buffers
core.py      an engine's core: the real loop and scheduler over the fake runner
caller.py    a client that speaks HTTP/1.1 and disconnects as its history says
world.py     all of it put together, and run until every task is done
laws.py      the laws that hold afterwards
"""
