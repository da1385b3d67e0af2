"""What a forward changes besides its outputs: noticed, put back for a second run, or refused.

Owns the looking, the putting back and the refusals. Runs no blocks. Imported by `drive`
only.
"""
