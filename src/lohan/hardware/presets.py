"""Machines by name: the paper's server, and boxes people really have.

Owns numbers and where each comes from. The marks: (paper) stated in or derived from arXiv
2403.06504v2 and its artifact, (sheet) the maker's data sheet or list price, (inferred) by the
arithmetic beside it, to be replaced by a measurement on the machine itself.
"""

from collections.abc import Callable

from lohan.errors import ConfigError, nearest_names
from lohan.hardware.machine import Gpu, Machine, Ssd, SsdPath
from lohan.units import GB, GIB, TB

RTX_4090 = Gpu(
    name="RTX 4090",
    memory_bytes=24 * GIB,  # (sheet)
    # (paper) fitted to the step times that compute bounds, attention's FLOPs included; 160e12 is
    # the peak of one block alone.
    flops_per_second=149e12,
    memory_bytes_per_second=1008e9,  # (sheet)
    price_dollars=1600,  # (paper)
    # (inferred) fp32 without tensor cores, 82.6e12 on the sheet, at the same share of its peak
    # as 16-bit: 143 / 165.2.
    flops_per_second_by_dtype=(("fp32", 71e12),),
)
RTX_3090 = Gpu(
    name="RTX 3090",
    memory_bytes=24 * GIB,  # (sheet)
    flops_per_second=67.5e12,  # (paper) fitted like the RTX 4090
    memory_bytes_per_second=936e9,  # (sheet)
    price_dollars=1499,  # (sheet) price at launch
    flops_per_second_by_dtype=(("fp32", 31e12),),  # (inferred) 35.6e12 on the sheet x 143 / 165.2
)
RTX_4080 = Gpu(
    name="RTX 4080",
    memory_bytes=16 * GIB,  # (sheet)
    # (inferred) the 4090's rate x 97.5 / 165.2, the ratio of the sheets' dense 16-bit rates.
    flops_per_second=87.9e12,
    memory_bytes_per_second=716.8e9,  # (sheet)
    price_dollars=1199,  # (sheet) price at launch
    flops_per_second_by_dtype=(("fp32", 42e12),),  # (inferred) 48.7e12 on the sheet x 143 / 165.2
)
A100_80GB = Gpu(
    name="A100 80GB",
    memory_bytes=80 * GIB,  # (sheet)
    # (paper) derived: 30B at 25.6 tokens/s per 1000 dollars on 8 GPUs is 5120 tokens/s, times
    # 8 x 30e9 FLOPs per token, over 8 GPUs. The sheet says 312e12.
    flops_per_second=154e12,
    memory_bytes_per_second=2039e9,  # (sheet)
    price_dollars=0,  # part of the host's price: the box is sold as one
)

P5510 = Ssd(
    name="Intel P5510 3.84TB",
    # (paper) fitted to the step times over 1 to 12 drives, together with the path below.
    read_bytes_per_second=7.0e9,
    write_bytes_per_second=3.85e9,
    capacity_bytes=3840 * GB,  # (sheet)
    endurance_bytes=7000 * TB,  # (sheet) one drive write per day for 5 years
    price_dollars=308,  # (paper)
)
CONSUMER_GEN4 = Ssd(
    name="consumer Gen4 2TB",
    read_bytes_per_second=7e9,  # (sheet) typical of the class
    write_bytes_per_second=1.7e9,  # (inferred) typical once the fast cache is full
    capacity_bytes=2 * TB,
    endurance_bytes=1200 * TB,  # (sheet) typical of the class
    price_dollars=150,  # (inferred) street price
)

_SERVER_SSD_PATH = SsdPath(
    is_duplex=False,  # (paper) derived: reads and writes of the array do not overlap
    # (paper) fitted: step times over 1 to 12 drives follow constant + slope / drives, as if each
    # byte took 1 / 40e9 s beside the drives. Twelve drives then move 20.4e9 bytes/s both ways.
    read_ceiling_bytes_per_second=40e9,
    write_ceiling_bytes_per_second=40e9,
    is_pipelined=False,
)
_DESKTOP_SSD_PATH = SsdPath(
    is_duplex=True,  # each drive has its own PCIe lanes, and PCIe goes both ways at once
    # (inferred) one drive on four PCIe 4 lanes of the CPU, the others behind the eight lanes of
    # the chipset: 7e9 and 14e9 after protocol overhead.
    read_ceiling_bytes_per_second=21e9,
    write_ceiling_bytes_per_second=21e9,
)


def _paper_server(gpu: Gpu, name: str) -> Machine:
    return Machine(
        name=name,
        gpu=gpu,
        num_gpus=1,
        ram_bytes=768 * GIB,  # (paper) says 768 GB, which memory modules count in units of 1024
        ram_to_gpu_bytes_per_second=21e9,  # (paper)
        gpu_to_ram_bytes_per_second=21e9,  # (paper)
        # (paper) derived twice for 12.85e9 parameters. ZeRO-Infinity's optimizer stage takes
        # 23.5 s, of which 30 bytes per parameter at 20.45e9 take 18.9 s. ZeRO-Offload's constant
        # part takes 8.1 s, of which 6 bytes per parameter at 21e9 take 3.7 s. What is left is
        # 4.6 s and 4.4 s, so 2.8e9 and 2.9e9 parameters per second.
        cpu_update_parameters_per_second=2.8e9,
        ssds=(P5510,) * 12,  # (paper)
        ssd_path=_SERVER_SSD_PATH,
        host_price_dollars=14_098,  # (paper) without GPU and SSDs
    )


def _consumer_box(
    name: str, *, ram_bytes: int, num_ssds: int, host_price_dollars: float
) -> Machine:
    return Machine(
        name=name,
        gpu=RTX_4090,
        num_gpus=1,
        ram_bytes=ram_bytes,
        # (inferred) PCIe 4 x16 with pinned memory: 31.5e9 on paper, about 25e9 reached.
        ram_to_gpu_bytes_per_second=25e9,
        gpu_to_ram_bytes_per_second=25e9,
        # (inferred) two DDR5 channels reach about 65e9 bytes/s; an update of the 12-byte state
        # reads 14 and writes 12 bytes per parameter.
        cpu_update_parameters_per_second=2.5e9,
        ssds=(CONSUMER_GEN4,) * num_ssds,
        ssd_path=_DESKTOP_SSD_PATH,
        host_price_dollars=host_price_dollars,
    )


def _dgx_a100() -> Machine:
    drive = Ssd(
        name="DGX data drive 3.84TB",
        read_bytes_per_second=6.5e9,  # (inferred) as the P5510, of the same class
        write_bytes_per_second=3.2e9,  # (inferred) likewise
        capacity_bytes=3840 * GB,  # (sheet)
        endurance_bytes=7000 * TB,  # (inferred) likewise
        price_dollars=0,  # part of the host's price
    )
    return Machine(
        name="dgx-a100",
        gpu=A100_80GB,
        num_gpus=8,
        ram_bytes=2048 * GIB,  # (sheet)
        ram_to_gpu_bytes_per_second=25e9,  # (inferred) PCIe 4 x16, as above
        gpu_to_ram_bytes_per_second=25e9,
        # (inferred) 16 channels of DDR4-3200 as in the paper's server.
        cpu_update_parameters_per_second=2.8e9,
        ssds=(drive,) * 8,  # (sheet)
        ssd_path=SsdPath(
            is_duplex=True,
            read_ceiling_bytes_per_second=50e9,  # (inferred) two switches with x16 each
            write_ceiling_bytes_per_second=50e9,
        ),
        host_price_dollars=200_000,  # (paper) the whole box
    )


_PRESETS: dict[str, Callable[[], Machine]] = {
    "paper-4090": lambda: _paper_server(RTX_4090, "paper-4090"),
    "paper-3090": lambda: _paper_server(RTX_3090, "paper-3090"),
    "paper-4080": lambda: _paper_server(RTX_4080, "paper-4080"),
    # Memory modules count in units of 1024: a "64 GB" kit is 64 GiB. Host prices are inferred.
    "desktop-4090": lambda: _consumer_box(
        "desktop-4090", ram_bytes=64 * GIB, num_ssds=1, host_price_dollars=1400
    ),
    "workstation-4090": lambda: _consumer_box(
        "workstation-4090", ram_bytes=128 * GIB, num_ssds=2, host_price_dollars=2200
    ),
    "dgx-a100": _dgx_a100,
}

MACHINE_NAMES: tuple[str, ...] = tuple(_PRESETS)
"""Every preset, in the order they are listed to the user."""


def machine_named(name: str) -> Machine:
    """Return a preset machine.

    Raises:
        ConfigError: if there is none of that name; the message names the nearest.
    """
    preset = _PRESETS.get(name.strip().casefold())
    if preset is None:
        raise ConfigError(
            f'there is no machine named "{name}"',
            why="it is neither a preset nor the path of a .json file",
            remedy=f"{nearest_names(name, MACHINE_NAMES)}, or give the path of a machine file "
            "(.json)",
        )
    return preset()


def machine_from(text: str) -> Machine:
    """Return the machine a user means: a preset's name, or the path of a .json file.

    Raises:
        ConfigError: if it is neither, or the file is no machine.
    """
    return Machine.load(text) if text.lower().endswith(".json") else machine_named(text)
