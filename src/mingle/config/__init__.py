"""What the user, the launcher and the machine say, read once, from a mapping, before the first packet."""
