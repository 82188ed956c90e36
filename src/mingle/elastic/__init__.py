"""Elastic jobs: torchrun's agents among themselves, in a job that outlives the host of its store."""
