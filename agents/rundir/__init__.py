"""How a hub is found, kept alive and spoken to: folders, addresses, keys, sockets."""
