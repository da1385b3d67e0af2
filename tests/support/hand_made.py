"""Blocks and machines with round numbers, for results worked out by hand."""

from lohan.hardware.machine import Gpu, Machine, Ssd, SsdPath
from lohan.model.shape import INPUT, BlockShape, Growth, ModelShape, OperatorShape


def operator(
    index: int,
    *,
    inputs: tuple[int, ...] = (INPUT,),
    mb: int = 1,
    gflop: int = 1,
    is_saved: bool = True,
) -> OperatorShape:
    """An operator of `mb` million bytes and `gflop` 1e9 FLOPs, whatever the batch."""
    return OperatorShape(
        index=index,
        name=f"op{index}",
        inputs=inputs,
        output_bytes=Growth(fixed=mb * 10**6),
        forward_flops=Growth(fixed=gflop * 10**9),
        backward_flops=Growth(fixed=2 * gflop * 10**9),
        is_saved=is_saved,
    )


def block(
    *operators: OperatorShape, input_mb: int = 2, num_parameters: int = 10**6, frozen: int = 0
) -> BlockShape:
    """A block with those operators."""
    return BlockShape(
        name="block",
        num_parameters=num_parameters,
        num_frozen_parameters=frozen,
        operators=operators,
        input_bytes=Growth(fixed=input_mb * 10**6),
        output_bytes=Growth(fixed=input_mb * 10**6),
    )


def model(*blocks: BlockShape, tied: tuple[tuple[int, int, int], ...] = ()) -> ModelShape:
    """A model of those blocks in that order."""
    return ModelShape(
        name="hand made", kinds=blocks, sequence_of_kinds=tuple(range(len(blocks))), tied=tied
    )


def machine(
    *,
    tflops: float = 1,
    link_gb: float = 1,
    ssd_gb: float = 1,
    is_duplex: bool = False,
    ram_gb: float = 100,
    gpu_gb: float = 100,
    cpu_per_second: float = 1e9,
    num_gpus: int = 1,
) -> Machine:
    """A machine of round rates."""
    drive = Ssd(
        name="drive",
        read_bytes_per_second=ssd_gb * 1e9,
        write_bytes_per_second=ssd_gb * 1e9,
        capacity_bytes=10**13,
        endurance_bytes=10**15,
        price_dollars=100,
    )
    return Machine(
        name="hand made",
        gpu=Gpu(
            name="gpu",
            memory_bytes=int(gpu_gb * 1e9),
            flops_per_second=tflops * 1e12,
            memory_bytes_per_second=1e12,
            price_dollars=1000,
        ),
        num_gpus=num_gpus,
        ram_bytes=int(ram_gb * 1e9),
        ram_to_gpu_bytes_per_second=link_gb * 1e9,
        gpu_to_ram_bytes_per_second=link_gb * 1e9,
        cpu_update_parameters_per_second=cpu_per_second,
        ssds=(drive,),
        ssd_path=SsdPath(
            is_duplex=is_duplex,
            read_ceiling_bytes_per_second=1e12,
            write_ceiling_bytes_per_second=1e12,
        ),
        host_price_dollars=1000,
    )


def all_output_bytes(block: BlockShape) -> Growth:
    """Bytes of all operator outputs, kept or not."""
    return Growth.total(operator.output_bytes for operator in block.operators)
