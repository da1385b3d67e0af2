"""What surrounds a forward and belongs to thread or process: random generators, modes, settings.

Owns saving, restoring and counting them. Knows no blocks. Imported by the rooms of `drive` and by
`engine`.
"""
