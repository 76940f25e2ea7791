"""Images: imported into the node's store, removed when nobody needs them."""
