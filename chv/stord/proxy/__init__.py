"""The in-flight proxy: a worker that carries the vhost-user control messages of one disk.

The storage daemon keeps the requests in flight in memory that a VMM hands to its successor, but
does not say that it can; the proxy says it, so a VMM survives the death of its storage daemon.
No data passes through here: rings and doorbells are shared between guest and storage daemon.

The package is a process of its own, one per disk: standard library only, nothing of CHV's
(`command` alone is for stord, which starts it). Hostile input comes from the VMM; whatever it
sends ends its own session at worst.
"""
