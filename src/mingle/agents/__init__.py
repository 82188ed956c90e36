"""The agents of torchrun among themselves: a gathering that outlives its host."""
