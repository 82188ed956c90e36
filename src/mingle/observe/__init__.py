"""Observers, the part of ``mingle-discover`` that uses the network: they find jobs, or ping hosts."""
