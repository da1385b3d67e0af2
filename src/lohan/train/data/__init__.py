"""Rows in: files and hub names read, formats told apart, chats turned into tokens with a loss mask.

Owns what a row may look like and the errors that name it. Knows no model weights and no engine.
Imported by `settings`, `trainer`, `fine_tune` and the preview's command.
"""
