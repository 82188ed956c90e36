"""The connections of a process: how they are made, answered and proved."""
