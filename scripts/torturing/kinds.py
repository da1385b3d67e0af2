"""Kinds of faults by name, and how often each is drawn."""

from torturing import changes, exports, flips, lives

KINDS = {
    **lives.KINDS,
    "changed": changes.changed,
    "exports": exports.exports,
    "flips": flips.flips,
}
WEIGHTS = {
    "kills": 9,
    "power": 7,
    "failures": 2,
    "full": 1,
    "gone": 1,
    "changed": 1,
    "exports": 2,
    "flips": 2,
}
