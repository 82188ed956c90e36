"""From a call to a ``Job``: environment, rendezvous and process group. The only writer of ``os.environ``."""
