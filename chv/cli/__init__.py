"""The `chv` command: the only package that prints. Speaks to the agent's API and to chv.host."""
