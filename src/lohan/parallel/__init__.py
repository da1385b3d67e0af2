"""Several processes that take every step together, each with a slice of every block's states.

Owns ranks: who they are, how blocks are cut among them, what they send each other, and sums whose
bits do not depend on how many there are. Imported by `lanes`, `engine` and what is above. Never
decides when something is sent: the schedule does.
"""
