"""chv-nwd: tenant networks in network namespaces, NICs, and connections into a guest.

No storage, no VM life cycle. `service` answers calls, `keeper` drives one network towards its
record, `plan` decides (pure), `observe` and `apply` touch the world through `kernel` and `nft`.
"""
