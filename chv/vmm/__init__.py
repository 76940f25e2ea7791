"""VMM drivers: one port, an adapter each for QEMU and Cloud Hypervisor, and a shipped fake.

Knows nothing of storage or networks beyond socket paths and file descriptors that it is given.
"""
