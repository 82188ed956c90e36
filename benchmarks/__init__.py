"""Benchmarks: mingle beside its peers, in alternation, in one run. ``python -m benchmarks --help``; docs/benchmarks.md.

=================  ==========================================================================================
figures            ``samples`` (statistics), ``results`` (what a comparison yields, JSON), ``guard`` (limits in CI)
shown              ``table``, ``plots``, ``document``
lab                ``hosts`` (rounds on hosts of the lab, datagrams on their bridge), ``fresh``, ``precedence``
contenders         ``mingle_ranks``, ``zeroconf_ranks``
comparisons        ``__main__.ORDER`` names them
=================  ==========================================================================================
"""
