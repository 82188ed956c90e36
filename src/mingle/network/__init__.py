"""Interfaces and sockets that never block. Knows no protocol."""
