"""The sections of a report, each made from the files of a run.

Owns what is told and in which order. Imported by `report.page`. Never reads a file.
"""
