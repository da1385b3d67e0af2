import errno
import os
import pathlib

import pytest

from lohan.errors import ConfigError, StorageError
from lohan.ssd import Access, check_directories, check_directory
from lohan.ssd.runs import directory_check


def test_a_good_directory_is_described_and_left_empty(tmp_path: pathlib.Path) -> None:
    report = check_directory(tmp_path)
    assert report.path == os.path.realpath(tmp_path)
    assert report.filesystem not in ("", "unknown")
    assert 0 < report.free_bytes <= report.total_bytes
    assert report.device == tmp_path.stat().st_dev
    assert list(tmp_path.iterdir()) == []


def test_missing_and_wrong_places_are_refused_with_their_path(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path, number in ((tmp_path / "missing", errno.ENOENT), (file, errno.ENOTDIR)):
        with pytest.raises(StorageError, match="cannot be used") as caught:
            check_directory(path)
        assert (caught.value.errno, caught.value.path) == (number, str(path))
        assert ("mkdir -p" in caught.value.remedy) == (number == errno.ENOENT)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="permission"):
        check_directory(tmp_path)


def test_an_unwritable_place_is_refused() -> None:
    with pytest.raises(StorageError, match="cannot be used"):
        check_directory("/proc")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
def test_ram_is_not_taken_for_an_ssd() -> None:
    report = check_directory("/dev/shm")
    assert report.filesystem == "tmpfs"
    assert any("that is RAM, not an SSD" in warning for warning in report.warnings)


def test_a_filesystem_that_refuses_direct_io_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_buffered(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, mode)

    monkeypatch.setattr(directory_check.os, "open", open_buffered)
    report = check_directory(tmp_path)
    assert report.access is Access.BUFFERED
    assert any("refuses direct I/O" in warning for warning in report.warnings)
    assert list(tmp_path.iterdir()) == []


def test_a_filesystem_without_nameless_files_is_checked_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_named(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real_open(path, flags, mode)

    monkeypatch.setattr(directory_check.os, "open", open_named)
    assert check_directory(tmp_path).free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_no_directory_and_the_same_one_twice_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="no SSD directory"):
        check_directories([])
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="given twice"):
        check_directories([tmp_path, tmp_path / "link"])


def test_directories_on_one_filesystem_are_said_to_be_no_faster(tmp_path: pathlib.Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = check_directories([tmp_path / "a", tmp_path / "b"])
    assert not any("same filesystem" in warning for warning in first.warnings)
    assert any("same filesystem" in warning for warning in second.warnings)


def test_the_innermost_mount_names_the_filesystem(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 8:2 / /fast\\040disk rw - xfs /dev/nvme0n1 rw\n"
        "3 2 8:3 / /fast\\040disk rw,noatime shared:1 - btrfs /dev/nvme1n1 rw\n"
    )
    monkeypatch.setattr(directory_check, "_MOUNTS", str(mounts))
    assert directory_check.filesystem_type("/fast disk/run") == "btrfs"
    assert directory_check.filesystem_type("/fast disk2") == "ext4"
    monkeypatch.setattr(directory_check, "_MOUNTS", str(tmp_path / "missing"))
    assert directory_check.filesystem_type("/") == "unknown"
