"""Where machines, sockets, clock and the TCPStore meet."""
