"""Benchmarks: each prints a table and can be run alone; see docs/benchmarks.md."""
