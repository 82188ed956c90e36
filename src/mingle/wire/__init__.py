"""What travels: datagrams, frames, their proofs, the groups. Hostile bytes in them end here, in one exception."""
