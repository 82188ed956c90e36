"""The demo of docker-compose.yml, for real: an image that is built here, containers, their networks and their output.

`make test-compose` runs it, on the Docker engine that answers, or else on one of its own that is gone afterwards.
"""
