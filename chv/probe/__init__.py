"""The probe guest: a bare-metal program that proves that a VM's parts work, and says so.

`image` names the shipped ELF and renders its command line, `lines` reads what it says, `recipe` is
how the ELF is built from `guest/`. Nothing here starts a VMM or opens a port: who boots the probe
does that. `docs/probe.md` has the protocol.
"""
