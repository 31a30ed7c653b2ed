"""The relay of a node: all ranks of the node share its one connection to the hub."""
