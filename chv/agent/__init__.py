"""The node agent: desired state, operations, reconcilers; it alone talks to VMMs."""
