"""nftables: `rules` and `host_rules` make text (pure), `ruleset` loads it in one transaction."""
