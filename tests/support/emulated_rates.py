"""Rates of an emulated device that are easy to reckon with."""

from lohan.device import EmulatedRates

RATES = EmulatedRates(
    ram_to_gpu_bytes_per_second=1000.0,
    gpu_to_ram_bytes_per_second=500.0,
    flops_per_second=100.0,
    memory_bytes_per_second=10.0,
)
