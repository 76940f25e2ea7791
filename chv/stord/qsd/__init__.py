"""Everything that speaks to qemu-storage-daemon: argv, node graph, QMP, vhost-user priming."""
