"""The node's side of its control plane: what is wanted comes in, what is so goes out."""
