"""A run on disk and on the console: its folder, files, resume points, progress, signals, uploads.

Owns what is written beside the model and what a resume reads. Trains nothing. Imported by
`trainer`, `fine_tune` and the commands that take a run.
"""
