"""Versions and native code: what is installed, and which paths of it are in use.

Owns what counts as a wrong version: the ranges lohan's own package metadata gives. Measures
nothing. Called by `checks`.
"""

import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata

import lohan
from lohan import _native, matrix_tiles
from lohan.doctor.finding import Finding, Level

_SHOWN = ("torch", "transformers", "trl", "datasets", "accelerate", "diffusers")
_OPTIONAL = ("diffusers",)


def examine_software() -> Iterator[Finding]:
    """Versions of everything that training needs."""
    yield Finding(name="lohan", found=lohan.__version__)
    yield Finding(name="python", found=platform.python_version())
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Finding(name="system", found=system)
    usable = len(os.sched_getaffinity(0))
    yield Finding(name="cores", found=f"{usable} of {os.cpu_count() or usable}")
    wanted = wanted_versions()
    for package in _SHOWN:
        yield _package(package, wanted.get(package, ()))


def examine_tiles() -> Finding:
    """Whether the processor's matrix tiles run, which torch's libraries take for granted."""
    name, found = "matrix tiles (AMX)", _native.probe_tiles()
    if found == "none":
        return Finding(name=name, found="the processor has none")
    if found == "run":
        return Finding(name=name, found="they run")
    limits = ", ".join(f"{one}={os.environ.get(one)}" for one in matrix_tiles.WITHOUT_TILES)
    return Finding(
        name=name,
        found=f"shown by the processor, do not run here ({found}), left out: {limits}",
        level=Level.NOTE,
        remedy="nothing is to be done: bf16 products on the processor are slower than they could "
        "be, and as right; a machine that runs them is faster",
    )


def examine_kernels() -> Iterator[Finding]:
    """The native update kernels: which are in use, and whether they give the judge's bits."""
    used, usable = _native.kernel_isa(), _native.available_kernel_isas()
    lacking = [isa for isa in _native.compiled_kernel_isas() if isa not in usable]
    found = f"{used} (usable: {', '.join(usable)}"
    found += f"; this processor lacks {', '.join(lacking)})" if lacking else ")"
    try:
        wrong = [isa for isa in usable if not gives_the_judges_bits(isa)]
        checked = "results checked"
    except ModuleNotFoundError:  # the judge is torch, whose absence has a finding of its own
        wrong, checked = [], "results not checked"
    if wrong:
        yield Finding(
            name="update kernels",
            found=f"{found}; wrong results from {', '.join(wrong)}",
            level=Level.PROBLEM,
            remedy="training with them would be wrong: build lohan anew on this machine (pip "
            "install --no-binary lohan --force-reinstall lohan), and report this",
        )
    elif used == "portable":
        yield Finding(
            name="update kernels",
            found=found,
            level=Level.NOTE,
            remedy="the processor has neither AVX2 nor AVX-512: updates are several times slower, "
            "nothing else changes",
        )
    else:
        yield Finding(name="update kernels", found=f"{found}, {checked}")
    yield Finding(name="checksums", found=_native.crc32c_path())


def gives_the_judges_bits(isa: str) -> bool:
    """Whether a kernel updates some thousand elements as the slow judge does."""
    import torch

    from lohan.optimizer import AdamWSettings, SplitState, reference, update_states
    from lohan.optimizer.settings import prepare_step

    generator = torch.Generator().manual_seed(3)
    count = 5003  # not a multiple of any vector's length
    gradient, p32, m32 = (torch.randn(count, generator=generator) for _ in range(3))
    v = torch.rand(count, generator=generator)
    p16, lo16, tie = reference.split(p32)
    before = (p16, lo16, m32, reference.with_tie(v, tie))
    settings = AdamWSettings(lr=1e-3)
    scalars = prepare_step(settings, step=3, num_elements=count, grad_scale=0.5)
    grad16 = gradient.to(torch.bfloat16)
    expected = reference.adamw_split(grad16, *before, scalars)
    parts = [one.clone() for one in before]
    update_states(
        grad16,
        SplitState(p16=parts[0], lo16=parts[1], m32=parts[2], v32=parts[3]),
        settings=settings,
        step=3,
        grad_scale=0.5,
        isa=isa,
    )
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(parts, expected, strict=True)
    )


def wanted_versions() -> dict[str, tuple[str, ...]]:
    """Ranges of versions by package, as lohan's metadata gives them for training."""
    try:
        lines = metadata.requires("lohan") or []
    except metadata.PackageNotFoundError:
        return {}
    wanted: dict[str, tuple[str, ...]] = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        if marker.strip() not in ("", 'extra == "models"', 'extra == "train"'):
            continue
        found = re.fullmatch(r"([\w.-]+)\s*([<>=!~].*)", requirement.strip())
        if found is not None:
            name, ranges = found.groups()
            wanted[name] = (*wanted.get(name, ()), ranges)
    return wanted


def _package(name: str, ranges: tuple[str, ...]) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if name in _OPTIONAL:
            return Finding(name=name, found="not installed; only image models need it")
        return Finding(
            name=name,
            found="not installed",
            level=Level.PROBLEM,
            remedy='install what training needs: pip install "lohan[train]"',
        )
    outside = [one for one in ranges if not is_within(version, one)]
    if outside:
        return Finding(
            name=name,
            found=f"{version}, and lohan needs {' and '.join(outside)}",
            level=Level.PROBLEM,
            remedy=f'install a version that fits: pip install "{name}{outside[0]}"',
        )
    return Finding(name=name, found=version)


def is_within(version: str, ranges: str) -> bool:
    """Whether a version is in a range such as `<3,>=2.13`; true where that cannot be told."""
    try:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet
        from packaging.version import InvalidVersion, Version
    except ModuleNotFoundError:
        return True
    try:
        return SpecifierSet(ranges).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True
