"""What runs next, and in which blocks: a pure, deterministic core turned by three drivers (DESIGN §1).

No clock, no randomness of its own, no threads, no I/O. Time comes in as an argument; the same calls give the
same plans, byte for byte.
"""
