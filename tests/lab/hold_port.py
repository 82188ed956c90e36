"""A program that knows nothing of mingle and has opened its UDP port; with the word ``shared``, as mingle does."""

from __future__ import annotations

import signal
import socket
import sys

if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        if "shared" in sys.argv:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 29499))
        print("holding", flush=True)
        signal.pause()
