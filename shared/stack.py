"""How deep foreign code may recurse. It is not in `shared.threads`: the process that such code runs
in starts often, and asyncio would take a fourth of its start."""

CHECK_STACK = 8 << 20
"""Stack in which a grammar is checked. Llguidance follows chains of rules by recursion, and a
process whose stack overflows dies."""
