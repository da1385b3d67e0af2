"""How much RAM may be taken: asked of made-up /proc and cgroup trees, and once of this machine."""

import pathlib
import resource
from collections.abc import Callable

import pytest

from lohan.errors import HardwareError
from lohan.hardware.limits import AvailableRam, available_ram_bytes, is_bound_by_locking
from lohan.units import GIB, MIB

NO_LIMIT_1 = 9223372036854771712


class Tree:
    """A root with the files a kernel would show; sizes in GiB."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {50 << 20} kB\n")
        self.limits()
        self.status()

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def limits(self, **soft: int) -> None:
        names = {
            "address": "Max address space",
            "data": "Max data size",
            "lock": "Max locked memory",
        }
        lines = [f"{'Limit':<25} {'Soft Limit':<20} {'Hard Limit':<20} Units"]
        for key, name in names.items():
            shown = soft.get(key, "unlimited")
            lines.append(f"{name:<25} {shown:<20} {'unlimited':<20} bytes")
        self.write("proc/self/limits", "\n".join(lines))

    def status(self, *, capabilities: int = 0, **sizes_kib: int) -> None:
        lines = ["Name:\tpython", f"CapEff:\t{capabilities:016x}"]
        lines += [f"{name}:\t{value:>8} kB" for name, value in sizes_kib.items()]
        self.write("proc/self/status", "\n".join(lines))

    def mount_2(self, *, shown: str = "/", place: str = "/") -> None:
        line = f"31 23 0:28 {shown} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw"
        self.write("proc/self/mountinfo", f"22 27 0:21 / /proc rw - proc proc rw\n{line}")
        self.write("proc/self/cgroup", f"0::{place}")

    def group_2(
        self, path: str, *, limit: int | str, used: int, high: int | str = "max", files: int = 0
    ) -> None:
        where = f"sys/fs/cgroup/{path}".rstrip("/")
        self.write(f"{where}/memory.max", limit)
        self.write(f"{where}/memory.high", high)
        self.write(f"{where}/memory.current", used)
        self.write(
            f"{where}/memory.stat",
            f"anon 5\ninactive_file {files // 2}\nactive_file {files - files // 2}",
        )

    def group_1(self, path: str, *, limit: int, used: int, files: int = 0) -> None:
        where = f"sys/fs/cgroup/memory/{path}".rstrip("/")
        self.write(f"{where}/memory.limit_in_bytes", limit)
        self.write(f"{where}/memory.usage_in_bytes", used)
        self.write(f"{where}/memory.stat", f"total_inactive_file {files}\ninactive_file 7")

    def ask(self, **options: bool) -> AvailableRam:
        return available_ram_bytes(root=self.root, **options)


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> Tree:
    return Tree(tmp_path)


def test_without_limits_the_kernel_says_what_is_available(tree: Tree) -> None:
    found = tree.ask()
    assert found.bytes == 50 * GIB
    assert found.reason == "50.0 GiB of 64.0 GiB of RAM are available"


def test_a_kernel_that_says_nothing_is_an_error(tree: Tree) -> None:
    tree.write("proc/meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(HardwareError, match="does not say"):
        tree.ask()


def test_the_limit_of_a_group_counts_less_what_the_group_holds(tree: Tree) -> None:
    tree.mount_2(place="/job")
    tree.group_2("job", limit=8 * GIB, used=3 * GIB)
    found = tree.ask()
    assert found.bytes == 5 * GIB
    assert "cgroup" in found.reason
    assert "8.0 GiB" in found.reason
    assert "3.0 GiB" in found.reason


def test_file_pages_of_a_group_can_be_dropped(tree: Tree) -> None:
    tree.mount_2(place="/job")
    tree.group_2("job", limit=8 * GIB, used=7 * GIB, files=6 * GIB)
    assert tree.ask().bytes == 7 * GIB


def test_the_tightest_group_above_the_process_counts(tree: Tree) -> None:
    tree.mount_2(place="/user/job/task")
    tree.group_2("user/job/task", limit="max", used=0)
    tree.group_2("user/job", limit=6 * GIB, used=5 * GIB)
    tree.group_2("user", limit=20 * GIB, used=5 * GIB)
    found = tree.ask()
    assert found.bytes == 1 * GIB
    assert "user/job is" in found.reason


def test_a_group_is_slowed_down_above_high(tree: Tree) -> None:
    tree.mount_2(place="/job")
    tree.group_2("job", limit=8 * GIB, high=4 * GIB, used=GIB)
    assert tree.ask().bytes == 3 * GIB


def test_a_group_over_its_limit_has_nothing_left(tree: Tree) -> None:
    tree.mount_2(place="/job")
    tree.group_2("job", limit=2 * GIB, used=3 * GIB)
    assert tree.ask().bytes == 0


def test_a_container_sees_its_group_at_the_mount(tree: Tree) -> None:
    # With a namespace of its own the place is "/"; without one the mount shows the place itself.
    for shown, place in (("/", "/"), ("/docker/abc", "/docker/abc"), ("/docker/abc", "/elsewhere")):
        tree.mount_2(shown=shown, place=place)
        tree.group_2("", limit=4 * GIB, used=GIB)
        assert tree.ask().bytes == 3 * GIB, (shown, place)


def test_version_1_groups_are_understood(tree: Tree) -> None:
    line = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    other = "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
    second = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    tree.write("proc/self/mountinfo", f"{other}\n{line}\n{second}")
    tree.write("proc/self/cgroup", "4:memory:/a/b\n1:cpu:/c\n0::/")
    tree.group_1("a/b", limit=NO_LIMIT_1, used=5)
    tree.group_1("a", limit=10 * GIB, used=4 * GIB, files=GIB)
    tree.group_1("", limit=NO_LIMIT_1, used=5)
    assert tree.ask().bytes == 7 * GIB


def test_limits_of_the_process_count(tree: Tree) -> None:
    tree.limits(address=30 * GIB)
    tree.status(VmSize=10 << 20)
    found = tree.ask()
    assert found.bytes == 20 * GIB
    assert "ulimit -v" in found.reason
    tree.limits(data=12 * GIB)
    tree.status(VmData=8 << 20)
    assert tree.ask().bytes == 4 * GIB


def test_locked_memory_bounds_only_where_locking_counts(tree: Tree) -> None:
    tree.limits(lock=8 * MIB)
    tree.status(VmLck=1 << 10)
    assert tree.ask().bytes == 50 * GIB
    assert tree.ask().lockable_bytes == 7 * MIB
    found = tree.ask(counts_locked=True)
    assert found.bytes == 7 * MIB
    assert "ulimit -l" in found.reason


def test_who_may_lock_everything_is_not_bound(tree: Tree) -> None:
    tree.limits(lock=8 * MIB)
    tree.status(capabilities=1 << 14)
    assert tree.ask(counts_locked=True) == tree.ask()
    assert tree.ask().lockable_bytes is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: tree.write("proc/self/mountinfo", "31 23\n\nx - cgroup2\n a b c d e - "),
        lambda tree: (tree.mount_2(), tree.write("proc/self/cgroup", "nonsense\n::\n")),
        lambda tree: (tree.mount_2(place="/gone"),),
        lambda tree: (tree.mount_2(), tree.write("sys/fs/cgroup/memory.max", "what")),
        lambda tree: tree.write("proc/self/limits", "Max locked memory"),
        lambda tree: tree.write("proc/self/status", "CapEff:\n"),
    ],
)
def test_what_cannot_be_read_bounds_nothing(tree: Tree, damage: Callable[[Tree], object]) -> None:
    damage(tree)
    assert tree.ask().bytes == 50 * GIB


def test_this_machine_has_an_answer() -> None:
    found = available_ram_bytes()
    assert 0 < found.bytes < 2**50
    assert found.reason


class Locks:
    """Pins as a driver would that keeps to the limit, or one that does not."""

    def __init__(self, *, keeps_to_limit: bool, is_broken: bool = False) -> None:
        self.keeps_to_limit, self.is_broken, self.pinned = keeps_to_limit, is_broken, 0

    def pin(self, address: int, nbytes: int) -> None:
        limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        assert address
        if self.is_broken:
            raise HardwareError("no", why="it never pins", remedy="none")
        if self.keeps_to_limit and limit_bytes != resource.RLIM_INFINITY and nbytes > limit_bytes:
            raise HardwareError("no", why="the limit", remedy="none")
        self.pinned += 1

    def unpin(self, address: int) -> None:
        self.pinned -= 1


@pytest.mark.skipif(
    0 <= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < MIB, reason="hardly any may be locked"
)
def test_locking_is_tried_under_a_lowered_limit_which_comes_back() -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert is_bound_by_locking(Locks(keeps_to_limit=True))
    free = Locks(keeps_to_limit=False)
    assert not is_bound_by_locking(free)
    assert free.pinned == 0
    assert not is_bound_by_locking(Locks(keeps_to_limit=True, is_broken=True))
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before
