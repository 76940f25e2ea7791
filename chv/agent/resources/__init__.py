"""What the machine has, what VMs take of it, and what may still be promised."""
