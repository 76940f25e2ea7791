"""Stand-ins for programs that are not everywhere; each is held to the real one by a suite."""
