"""The storage daemon of a node: volumes, and the workers that serve them to VMs.

Knows volumes and the VM ids they are attached to, nothing of a VM's life cycle, no network.
"""
