"""Volume classes: what a volume is on this node and how the storage daemon opens it."""
