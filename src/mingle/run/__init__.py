"""The command ``mingle-run``: start any program on every machine, with the address of one of them filled in.

The machines find each other as ranks do, without torch: each machine is a rank, and its rank is the node rank.
``docs/any-program.md`` describes the command.
"""
