"""The host helper: works without an agent. Prepares, checks, starts, purges; no platform logic."""
