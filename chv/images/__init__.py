"""Image artifacts by their sha256: import, built-in images, removal. Knows no Image objects."""
