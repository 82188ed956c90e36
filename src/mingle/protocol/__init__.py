"""The pure rules: when to speak, how to prove a session, who may join, who sits where, when to seal."""
