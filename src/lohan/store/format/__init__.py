"""What bytes of a block's state are where: parts, offsets, slots, and what lives in RAM.

Owns the on-disk format as numbers (docs/on-disk-format.md). Imported by the rest of `store`, and
through `lohan.store` by whoever plans memory. Never reads or writes a byte.
"""
