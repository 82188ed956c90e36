"""The pure machine of a rank that joins."""
