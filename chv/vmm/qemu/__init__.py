"""The QEMU adapter: QMP, the try-boot of an accelerator, and the driver that joins them."""
