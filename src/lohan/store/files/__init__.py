"""The files of a store, the tickets of what is under way in them, and counts of it.

Owns reading and writing of single parts. Imported by the rest of `store`. Never decides which slot
of a part is valid: `seals` does.
"""
