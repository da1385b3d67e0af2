"""Many stock architectures, tiny, and whether the engine trains them to the bit of a plain loop.

Owns which architectures there are, how each is made small, and what it is fed with. The comparison
is `lohan.verify`'s. Run by `scripts/verify_families`.
"""
