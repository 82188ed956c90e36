"""The session that a host keeps: its seats, and the commit by which its job forms."""
