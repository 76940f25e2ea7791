"""One measured value with its budget, as every area returns it."""

from __future__ import annotations

from typing import Any


class Results:
    """Makes the results of an area."""

    def __init__(self, area: str) -> None:
        self._area = area

    def __call__(
        self,
        name: str,
        value: float,
        unit: str,
        budget: float,
        baseline: str = "",
        *,
        at_least: bool = False,
    ) -> dict[str, Any]:
        """Return one; `at_least`: the budget is what it must reach, else what it may not exceed."""
        return {
            "id": f"{self._area}.{name}",
            "value": round(value, 3),
            "unit": unit,
            "budget": budget,
            "ok": value >= budget if at_least else value <= budget,
            "baseline": baseline,
        }
