"""What every CHV process shares: wire types, RPC, store, processes. A leaf: imports nothing of ours."""
