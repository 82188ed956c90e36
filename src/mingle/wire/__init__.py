"""What travels: datagrams, frames, their proofs, the groups. Every hostile byte ends here, in one exception."""
