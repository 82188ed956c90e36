"""``mingle-check``: does torch work between these machines, and which of them is slow or hanging?

`command` is the console script, and prints. Every rank finds the others by :func:`mingle.discover` and takes part
(`session`). Rank 0 has all of them do the same steps (`conductor`): collectives (correctness), all_reduce of growing
size (bandwidth), and each pair of machines alone in the rounds of a tournament (links). `control` carries tasks and
results on connections apart from what is tested, as `messages`. `probes` is what a rank does, and `verdicts` names what
is at fault.
"""
