"""The Cloud Hypervisor driver: HTTP over a Unix socket, and a file of events."""
