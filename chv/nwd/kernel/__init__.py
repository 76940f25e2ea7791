"""The only home of netlink, setns, namespaces, taps and sysctls. Decides nothing.

Errors of the kernel arrive as typed errors (`errors.translated`), never as half-done work: every
function here is one idempotent effect or one observation.
"""
