"""Snapshots: taken once, shown, deleted by stord."""
