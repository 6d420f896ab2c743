"""The agent in Python: what helper/ does in C, for machines without a compiler, started inside by bubblewrap.

Runs as a program of its own, on the standard library and `strop.sandboxes.wire` alone; nothing here is imported by
the host. A sandbox cannot tell the two agents apart, except by their speed.
"""
