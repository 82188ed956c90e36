"""Who only looks, and who announces: the machines of ``mingle-discover``, and what drives them."""
