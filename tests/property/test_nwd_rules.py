"""The renderer for networks of any shape: differences lead where a replacement does."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from chv.nwd.nft import exposures, rules
from chv.nwd.nft.model import NetworkRules
from chv.nwd.nft.text import Ruleset
from tests.property.nwd_rules_strategies import networks

FIXED_NAMES = ("members", "counted", "rated", "limited")  # of the frame
FIXED = {f"{name}{family}" for name in FIXED_NAMES for family in (4, 6)}


class Kernel:
    """What a transaction makes of tables; refuses what the kernel refuses."""

    def __init__(self) -> None:
        self.sets: dict[str, str] = {}
        self.chains: dict[str, list[str]] = {}
        self.elements: dict[str, set[str]] = {}

    @classmethod
    def of(cls, ruleset: Ruleset) -> Kernel:
        kernel = cls()
        kernel.sets = {str(key): what for key, what in ruleset.sets.items()}
        kernel.chains = {str(key): list(lines) for key, lines in ruleset.chains.items()}
        elements = {str(key): set(each) for key, each in ruleset.all_elements().items()}
        kernel.elements = {key: each for key, each in elements.items() if each}
        return kernel

    def run(self, transaction: str) -> None:
        for line in transaction.splitlines():
            verb, kind, rest = line.split(" ", 2)
            family, table, name, *tail = rest.split(" ", 3)
            getattr(self, f"_{verb}_{kind}")(f"{family} {table} {name}", "".join(tail))
        for name, lines in self.chains.items():
            for line in lines:
                self._check(name, line)

    def _check(self, name: str, line: str) -> None:
        """Every reference of a rule must be there when the transaction ends."""
        for word in line.split():
            if word.startswith("@") and word[1:] not in FIXED:
                assert f"inet chv {word[1:]}" in self.sets, (name, line)
        for verb in ("jump", "goto"):
            if f"{verb} " in line:
                target = line.rpartition(f"{verb} ")[2].split()[0]
                fixed = target.startswith(("not_allowed_", "connections_"))
                assert fixed or f"inet chv {target}" in self.chains, (name, line)

    def _add_set(self, key: str, what: str) -> None:
        assert key not in self.sets
        self.sets[key] = what[2:-2]

    def _delete_set(self, key: str, _: str) -> None:
        name = key.rpartition(" ")[2]
        users = [line for lines in self.chains.values() for line in lines]
        assert not any(f"@{name} " in f"{line} " for line in users), "a rule still asks it"
        del self.sets[key]
        self.elements.pop(key, None)

    def _add_chain(self, key: str, _: str) -> None:
        assert key not in self.chains
        self.chains[key] = []

    def _flush_chain(self, key: str, _: str) -> None:
        self.chains[key].clear()

    def _delete_chain(self, key: str, _: str) -> None:
        name = key.rpartition(" ")[2]
        users = [line for lines in self.chains.values() for line in lines]
        users += [each for elements in self.elements.values() for each in elements]
        assert not any(f"{line} ".endswith(f" {name} ") for line in users), "still referred to"
        assert self.chains.pop(key) == []

    def _add_rule(self, key: str, line: str) -> None:
        self.chains[key].append(line)

    def _add_element(self, key: str, values: str) -> None:
        here = self.elements.setdefault(key, set())
        for value in values[2:-2].split(", "):
            keys = {each.partition(" : ")[0] for each in here}
            assert value.partition(" : ")[0] not in keys, "the key is taken"
            here.add(value)

    def _delete_element(self, key: str, values: str) -> None:
        for value in values[2:-2].split(", "):
            self.elements[key].remove(value)
        if not self.elements[key]:
            del self.elements[key]


@settings(max_examples=60, deadline=None)
@given(networks(), networks())
def test_a_difference_leads_to_what_a_replacement_would(
    old: NetworkRules, new: NetworkRules
) -> None:
    new = replace(new, subnet6=old.subnet6, gateway6=old.gateway6)  # else it is a replacement
    before, after = rules.render(old), rules.render(new)
    kernel = Kernel.of(before)
    kernel.run(after.difference(before))
    assert vars(kernel) == vars(Kernel.of(after))


@settings(max_examples=40, deadline=None)
@given(networks(), networks())
def test_digests_tell_rulesets_apart_and_nothing_else(old: NetworkRules, new: NetworkRules) -> None:
    before, after = rules.render(old), rules.render(new)
    same = before.frame == after.frame and vars(Kernel.of(before)) == vars(Kernel.of(after))
    assert (before.digest == after.digest) is same
    assert (after.difference(before) == "") is same
    shuffled = replace(new, nics=tuple(reversed(new.nics)), groups=tuple(reversed(new.groups)))
    assert rules.render(shuffled).digest == after.digest


@settings(max_examples=40, deadline=None)
@given(networks())
def test_no_element_belongs_to_two_parts(network: NetworkRules) -> None:
    ruleset = rules.render(network)
    each = [ruleset.elements, *(part.elements for part in ruleset.parts)]
    for left, right in combinations(each, 2):
        assert not any(left[key] & right[key] for key in left.keys() & right.keys())


@given(st.sets(st.integers(1, 200), min_size=2, max_size=8))
def test_a_backend_that_goes_moves_its_own_buckets_alone(numbers: set[int]) -> None:
    targets = sorted(f"10.0.0.{number} . 80" for number in numbers)
    gone, rest = targets[0], targets[1:]
    for bucket in range(exposures.BUCKETS):
        owner = exposures.bucket_owner(bucket, targets)
        assert owner == gone or exposures.bucket_owner(bucket, rest) == owner
