"""`chv doctor`: firewalls of others that would keep the host from forwarding for guests.

A packet must pass every base chain of a hook, so no rule of ours can help where a chain of Docker,
ufw, firewalld or anybody else drops what it does not know. What is found comes with the command
that lets our uplinks through there; nothing is changed. Judging is pure, looking is `look`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from chv.common.layout import Layout

OURS = "chv"  # our tables' names begin so
RUN = Path("/run/chv")
LEGACY_TABLES = ("/proc/net/ip_tables_names", "/proc/net/ip6_tables_names")
IPTABLES = {"ip": "iptables", "ip6": "ip6tables"}
FAMILIES = ("ip", "ip6", "inet")
VERDICTS = ("drop", "reject")
HARMLESS = frozenset({"counter", "log", "limit"})  # what may stand before such a verdict


class Blocking(msgspec.Struct, frozen=True):
    """A base chain of the forward hook that lets nothing through that it does not know."""

    family: str
    table: str
    chain: str
    how: str  # policy drop | a rule that rejects all | …
    owner: str  # docker | ufw | firewalld | ''

    @property
    def title(self) -> str:
        """The chain as nft names it."""
        return f"{self.family} {self.table} {self.chain}"


def blocking(objects: list[dict[str, Any]]) -> list[Blocking]:
    """Return the chains that block, from what nft lists as JSON."""
    chains = [item["chain"] for item in objects if "chain" in item]
    rules = [item["rule"] for item in objects if "rule" in item]
    found = []
    for chain in chains:
        if not _concerns(chain):
            continue
        how = _how(chain, rules)
        if how:
            place = (chain["family"], chain["table"])
            names = [c["name"] for c in chains if (c["family"], c["table"]) == place]
            owner = _owner(chain["table"], names)
            found.append(Blocking(*place, chain["name"], how, owner))
    return found


def _concerns(chain: dict[str, Any]) -> bool:
    foreign = not chain["table"].startswith(OURS)
    return foreign and chain.get("hook") == "forward" and chain["family"] in FAMILIES


def _how(chain: dict[str, Any], rules: Iterable[dict[str, Any]]) -> str:
    if chain.get("policy") == "drop":
        return "policy drop"
    place = (chain["family"], chain["table"], chain["name"])
    for rule in rules:
        if (rule["family"], rule["table"], rule["chain"]) != place:
            continue
        expressions = [key for part in rule.get("expr", []) for key in part]
        verdicts = [key for key in expressions if key in VERDICTS]
        if verdicts and set(expressions) <= HARMLESS | set(VERDICTS):
            return f"a rule that {verdicts[0]}s all the rest"
    return ""


def _owner(table: str, chains: list[str]) -> str:
    if table == "firewalld":
        return "firewalld"
    if "DOCKER-USER" in chains:
        return "docker"
    return "ufw" if any(name.startswith("ufw") for name in chains) else ""


def remedy(found: Blocking, links: Iterable[str]) -> str:
    """Return what to type; `links` are the beginnings of our uplinks' names."""
    return "; ".join(command for link in links for command in _commands(found, link))


def _commands(found: Blocking, link: str) -> list[str]:
    program = IPTABLES.get(found.family, "")
    match found.owner:
        case "docker" if program:
            chain = f"{program} -I DOCKER-USER"
            return [f"{chain} -i {link}+ -j ACCEPT", f"{chain} -o {link}+ -j ACCEPT"]
        case "ufw":
            return [f"ufw route allow in on {link}+", f"ufw route allow out on {link}+"]
        case "firewalld":
            zone = "firewall-cmd --permanent --zone=trusted"
            return [f"{zone} --add-interface={link}+", "firewall-cmd --reload"]
    insert = f"nft insert rule {found.title}"
    return [f'{insert} iifname "{link}*" accept', f'{insert} oifname "{link}*" accept']


# --- looking


def links() -> list[str]:
    """Return how the uplinks of this machine's nodes begin; without a node, as they would."""
    instances = sorted(path.name for path in RUN.iterdir()) if RUN.is_dir() else []
    return [Layout(instance=each).uplink("")[: 1 + len(each)] for each in instances] or ["c"]


def legacy() -> bool:
    """Tell whether there are rules of the old iptables, which nft does not show."""
    paths = [Path(text) for text in LEGACY_TABLES]
    return any(path.exists() and "filter" in path.read_text().split() for path in paths)


def look() -> list[dict[str, Any]]:
    """Return the chains of this namespace, with rules where they matter: others have many."""
    try:
        from nftables import Nftables

        nft = Nftables()
    except (ImportError, OSError):  # libnftables is missing, which is a finding of its own
        return []
    nft.set_json_output(True)
    chains = _listed(nft, "list chains")
    for chain in [each["chain"] for each in chains if "chain" in each]:
        if _concerns(chain):
            place = f"{chain['family']} {chain['table']} {chain['name']}"
            chains += [each for each in _listed(nft, f"list chain {place}") if "rule" in each]
    return chains


def _listed(nft: Any, command: str) -> list[dict[str, Any]]:
    code, output, _ = nft.cmd(command)
    found: list[dict[str, Any]] = msgspec.json.decode(output)["nftables"] if output else []
    return found if code == 0 else []
