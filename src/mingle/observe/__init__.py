"""Observers, the part of ``mingle-discover`` that uses the network: they find jobs, announce one, or ping hosts."""
