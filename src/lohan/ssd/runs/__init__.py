"""Directories of runs on SSDs: making, checking, locking and finding them again.

Owns what is in such a directory beside the files' contents. Imported by the rest of `ssd`, by
`store` and by the commands, through `lohan.ssd`. Never removes what it did not make.
"""
