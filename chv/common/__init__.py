"""What every CHV process shares: wire types, RPC, store, processes. Imports nothing of ours."""
