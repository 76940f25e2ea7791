"""CHV turns a Linux machine into a trustworthy VM host built on Cloud Hypervisor."""

VERSION = "0.1.0"
