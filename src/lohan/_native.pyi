"""Kernels and SSD engines of lohan, in C++17."""

# --- kernels: arrays are addresses and element counts; lohan.optimizer checks and calls them ---

LEAF_ELEMENTS: int

def kernel_isa() -> str: ...
def available_kernel_isas() -> list[str]: ...
def compiled_kernel_isas() -> list[str]: ...
def probe_tiles() -> str: ...
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

# --- io: aligned memory, checksums, engines (native/src/bind_buffers.cpp, bind_io.cpp) ---

class AlignedMemory:
    def __init__(self, nbytes: int, should_populate: bool) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def crc32c(before: int, address: int, nbytes: int) -> int: ...
def crc32c_portable(before: int, address: int, nbytes: int) -> int: ...
def crc32c_join(first: int, second: int, second_nbytes: int) -> int: ...
def crc32c_path() -> str: ...

class DriveQueue:
    def __init__(
        self,
        *,
        max_requests: int,
        max_bytes: int,
        block_bytes: int,
        is_simplex: bool,
        fairness_bytes: int,
    ) -> None: ...
    def push(self, request_id: int, operation: int, priority: int, nbytes: int) -> None: ...
    def next(self) -> tuple[int, int, int, int] | None: ...
    def finished(self, block: tuple[int, int, int, int]) -> None: ...
    def drop(self, request_id: int) -> int: ...
    @property
    def num_in_flight(self) -> int: ...
    @property
    def bytes_in_flight(self) -> int: ...
    @property
    def is_idle(self) -> bool: ...

class IoTicket:
    @property
    def is_done(self) -> bool: ...
    def wait_for(self, seconds: float) -> bool: ...
    @property
    def error_number(self) -> int: ...
    @property
    def is_short(self) -> bool: ...
    @property
    def got_bytes(self) -> int: ...

class OpenFile:
    def __init__(self, path: str, descriptor: int, drive: int, is_direct: bool) -> None: ...
    @property
    def descriptor(self) -> int: ...
    def close(self) -> None: ...

class DriveCounters:
    @property
    def num_started(self) -> int: ...
    @property
    def num_finished(self) -> int: ...
    @property
    def num_failed(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_continued(self) -> int: ...
    @property
    def num_retried(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def max_in_flight(self) -> int: ...

class IoEngine:
    def __init__(self, *, is_uring: bool) -> None: ...
    def add_drive(
        self,
        *,
        max_requests: int,
        max_bytes: int,
        block_bytes: int,
        is_simplex: bool,
        fairness_bytes: int,
    ) -> int: ...
    def start(
        self,
        operation: int,
        file: OpenFile,
        offset: int,
        address: int,
        nbytes: int,
        priority: int,
    ) -> IoTicket: ...
    def close(self) -> None: ...
    def counters(self, drive: int) -> DriveCounters: ...
    def replace_result(self, drive: int, nth: int, result: int) -> None: ...

def reserve_space(descriptor: int, from_bytes: int, nbytes: int) -> int: ...
def probe_uring() -> int: ...
def is_uring_compiled_in() -> bool: ...
