"""Hostile bytes by the million, against every decoder and the whole machines behind them.

The corpus is the golden packets (``tests/golden/packets.json``): every datagram and every frame there is, plain and
signed. ``python -m tests.fuzz --help`` tells how to run it; ``make fuzz`` does for a set time, guided by coverage.
"""
