"""The msgspec wire schema: resources and one file of Method tables per API. Types only, no I/O."""
