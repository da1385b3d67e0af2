"""What a user may set: the YAML file and the command line, checked and turned into arguments.

Owns names, aliases, limits and the reference of settings. Starts nothing. Imported by `run`,
`trainer` and `fine_tune`.
"""
