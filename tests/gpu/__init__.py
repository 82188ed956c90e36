"""NCCL on a real GPU."""
