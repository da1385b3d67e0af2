"""Answers as tables for people, and as JSON.

Owns wording and order of what is printed. Imported by the commands. Never computes what it prints.
"""
