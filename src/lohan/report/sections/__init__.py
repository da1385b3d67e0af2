"""The sections of a report, each made from the files of a run."""
