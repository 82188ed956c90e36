"""Probes between hosts: the machine, the figures, and what they mean."""
