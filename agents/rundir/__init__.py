"""Run folders, the files and sockets through which a hub is found, and the supervisor that keeps the hub running."""
