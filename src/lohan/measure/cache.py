"""Profiles kept between runs: `$XDG_CACHE_HOME/lohan/profile-<key>.json`.

Owns where a profile lies, when it is too old, and what is said about one that is not used. The key
is made of the hardware's facts, so directories on the same drives share a profile, and a profile
never moves to another box unnoticed. Measures nothing.
"""

import hashlib
import json
import pathlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from msgspec import to_builtins

from lohan.durable_files import replace_text
from lohan.errors import ConfigError
from lohan.hardware.this_host import PROFILES, cache_directory
from lohan.measure.facts import MachineFacts
from lohan.measure.measured import MeasuredMachine

MOST_AGE = timedelta(days=30)
"""Drives fill up and age, drivers change: older figures are taken again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProfile:
    """A profile, or why there is none."""

    profile: MeasuredMachine | None
    reason: str
    """Where it comes from, or what was wrong, in words for the user."""


def profile_path(facts: MachineFacts, *, directory: pathlib.Path | None = None) -> pathlib.Path:
    """Where the profile of this hardware lies."""
    text = json.dumps(to_builtins(facts), sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return (directory or cache_directory()) / f"profile-{key}.json"


def load_profile(
    facts: MachineFacts, *, directory: pathlib.Path | None = None, now: datetime | None = None
) -> LoadedProfile:
    """Return the profile of this hardware if it is there, whole and fresh."""

    def unused(reason: str) -> LoadedProfile:
        return LoadedProfile(profile=None, reason=reason)

    try:
        path = profile_path(facts, directory=directory)
        profile = MeasuredMachine.from_json(path.read_text(encoding="utf-8"), where=str(path))
    except FileNotFoundError:
        others = len(list(path.parent.glob(PROFILES)))
        elsewhere = f" ({others} of other hardware)" if others else ""
        return unused(f"this hardware has not been measured yet{elsewhere}")
    except UnicodeDecodeError:
        return unused(f"{path} is damaged: it is not text")
    except OSError as error:
        return unused(f"{path} cannot be read: {error.strerror}")
    except ConfigError as error:
        return unused(f"{error.what}: {error.why}")
    if profile.facts != facts:
        return unused(f"{path} was measured on other hardware")
    age = profile.age(now or datetime.now(UTC))
    if age > MOST_AGE:
        return unused(
            f"the profile is {age.days} days old, figures older than {MOST_AGE.days} are taken "
            "again"
        )
    if age < -timedelta(days=1):
        return unused(
            f"the profile says it was measured on {profile.measured_at:%Y-%m-%d}, which is still "
            "to come"
        )
    return LoadedProfile(profile=profile, reason=f"kept in {path}")


def save_profile(
    profile: MeasuredMachine, *, directory: pathlib.Path | None = None
) -> pathlib.Path:
    """Keep a profile; the file is there whole or not at all.

    Raises:
        ConfigError: it cannot be written; what was there before is untouched.
    """
    path = profile_path(profile.facts, directory=directory)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_text(path, profile.to_json())
    except (OSError, ConfigError) as error:
        reason = error.why if isinstance(error, ConfigError) else error.strerror or str(error)
        raise ConfigError(
            f"the profile cannot be kept in {path}",
            why=reason,
            remedy="set XDG_CACHE_HOME to a directory that can be written",
        ) from error
    return path
