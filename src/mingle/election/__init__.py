"""The pure machine of a process without a rank, until it is one or the other."""
