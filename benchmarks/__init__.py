"""Benchmarks: mingle beside its peers, in alternation, in one run. ``python -m benchmarks --help``; docs/benchmarks.md.

=================  ==========================================================================================
figures            ``samples`` (statistics), ``results`` (what a comparison yields, JSON), ``guard`` (what got worse)
shown              ``table``, ``plots``, ``document``
lab                ``hosts`` (rounds on hosts of the lab, datagrams on their bridge), ``memory_pages``, ``precedence``
contenders         ``mingle_ranks``, ``zeroconf_ranks``, ``bare_ranks``, ``original_ranks``, ``torch_ranks``
comparisons        ``last_rank``, ``late_rank``, ``limit``, ``known_address``, ``one_datagram``, ``loss``, ``wire``,
                   ``scale``, ``start_up``, ``memory``, ``micro``, ``torchrun``, ``torchrun_recovery``
=================  ==========================================================================================
"""
