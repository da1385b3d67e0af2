"""Manifests: which slot of every part is valid, written so that a crash finds one whole.

Owns the manifest, the search for the last one, and the order of a seal. Imported by the rest of
`store`. Never changes a state.
"""
