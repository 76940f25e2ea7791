"""A double of Cloud Hypervisor: the same options, API, events and exit codes, and no guest.

`python -m tests.doubles.cloud_hypervisor` takes the real program's options. What it does was seen
on the real one (docs/cloud-hypervisor.md), and one conformance suite holds both to it. It needs no
KVM and no privileges. Nothing in here may import from `chv`: a double that shares code with what it
tests agrees with its mistakes.
"""
