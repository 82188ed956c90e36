"""The pure machine of the rank that hosts the gathering."""
