"""The relay of a node: all ranks of the node share the relay's single connection to the hub."""
