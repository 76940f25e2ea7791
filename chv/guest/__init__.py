"""What goes into a guest: the built-in tiny image, seed disks, host keys. Knows no VM lifecycle."""
