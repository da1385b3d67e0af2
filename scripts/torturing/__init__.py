"""The parts of `scripts/torture`: children with a fault each, places, lives, flips, the judge."""
