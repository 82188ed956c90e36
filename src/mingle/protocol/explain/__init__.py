"""What people are told: the machines' observations in, causes and errors out. Nothing here decides anything."""
