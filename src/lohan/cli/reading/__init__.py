"""What was written on the command line: shared options, sizes, names, settings and output files.

Owns the refusal of what is not valid. Imported by the commands. Never answers anything.
"""
