"""Kernels and SSD engines of lohan, in C++17."""

# --- kernels: arrays are addresses and element counts; lohan.optimizer checks and calls them ---

LEAF_ELEMENTS: int

def kernel_isa() -> str: ...
def available_kernel_isas() -> list[str]: ...
def compiled_kernel_isas() -> list[str]: ...
def adamw_split(
    *,
    grad: int,
    grad_format: str,
    p16: int,
    lo16: int,
    m32: int,
    v32: int,
    num_elements: int,
    ranges: list[tuple[int, int, float, float]],
    scalars: tuple[float, float, float, float, float, float],
    num_threads: int,
    isa: str = "",
) -> None: ...
def adamw_plain(
    *,
    grad: int,
    grad_format: str,
    p32: int,
    m32: int,
    v32: int,
    p16: int = 0,
    p16_format: str = "",
    num_elements: int,
    ranges: list[tuple[int, int, float, float]],
    scalars: tuple[float, float, float, float, float, float],
    num_threads: int,
    isa: str = "",
) -> None: ...
def sum_of_squares(
    *,
    grad: int,
    grad_format: str,
    num_elements: int,
    leaf_sums: int,
    num_threads: int,
    isa: str = "",
) -> int: ...
def combined_leaf_sums(*, leaf_sums: int, num_leaves: int) -> float: ...
def convert(
    *,
    source: int,
    source_format: str,
    target: int,
    target_format: str,
    num_elements: int,
    num_threads: int,
    isa: str = "",
) -> None: ...
def split_masters(
    *,
    p32: int,
    p16: int,
    lo16: int,
    v32: int,
    num_elements: int,
    num_threads: int,
    isa: str = "",
) -> None: ...
def join_masters(
    *,
    p16: int,
    lo16: int,
    v32: int,
    p32: int,
    num_elements: int,
    num_threads: int,
    isa: str = "",
) -> None: ...
def stream_split(
    *,
    grad: int,
    p16: int,
    lo16: int,
    m32: int,
    v32: int,
    num_elements: int,
    num_threads: int,
    isa: str = "",
) -> None: ...

# --- end of kernels ---
