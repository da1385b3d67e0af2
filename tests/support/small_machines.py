"""Machines small enough that tiny models make plans with every feature."""

from dataclasses import replace

from lohan.hardware import machine_named
from lohan.hardware.machine import Gpu, Machine, Ssd, SsdPath


def small_machine(num_ssds: int = 1) -> Machine:
    """A machine whose parts are about equally busy with a tiny model."""
    return Machine(
        name="small",
        gpu=Gpu(
            name="gpu",
            memory_bytes=1 << 30,
            flops_per_second=1e10,
            memory_bytes_per_second=1e11,
            price_dollars=1.0,
        ),
        num_gpus=1,
        ram_bytes=1 << 30,
        ram_to_gpu_bytes_per_second=1e9,
        gpu_to_ram_bytes_per_second=1e9,
        cpu_update_parameters_per_second=1e8,
        ssds=(
            Ssd(
                name="ssd",
                read_bytes_per_second=1e9,
                write_bytes_per_second=1e9,
                capacity_bytes=1 << 40,
                endurance_bytes=1 << 50,
                price_dollars=1.0,
            ),
        )
        * num_ssds,
        ssd_path=SsdPath(
            is_duplex=False,
            read_ceiling_bytes_per_second=1e10,
            write_ceiling_bytes_per_second=1e10,
        ),
        host_price_dollars=1.0,
    )


def desktop_with_drive_of(capacity_bytes: int) -> Machine:
    """Models that are planned in a moment need more than its drive holds."""
    machine = machine_named("desktop-4090")
    (drive,) = machine.ssds
    return replace(machine, ssds=(replace(drive, capacity_bytes=capacity_bytes),))
