"""The published systems: their policies, their figures, and both beside ours.

Owns what is known of other systems and of the paper's measurements. Imported by the commands and by
`lohan.attach`, which take policies by name; nothing below knows that these systems exist. Fits
nothing and runs nothing: a published system is another Plan.
"""

from lohan.paper.policies import POLICIES, POLICY_NAMES, policy_named

__all__ = ["POLICIES", "POLICY_NAMES", "policy_named"]
