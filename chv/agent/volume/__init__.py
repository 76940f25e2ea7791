"""Volumes: made, grown and deleted through stord."""
